"""Texts that all surfaces share, as plain text or as `sentences.Sentence`. Each surface adds its own markup and
escaping. Pure.
"""
