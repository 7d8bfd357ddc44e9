"""Texts about runs, questions and times that all surfaces share. Pure.

Functions take a domain value or its API document and return plain text, or a `sentences.Sentence` if surfaces lay out
parts differently: the console links a run, the command line shortens its ID. Each surface adds its own markup and
escaping.
"""
