"""Texts that all surfaces share, plain or as `sentences.Sentence`; surfaces add markup and escaping."""
