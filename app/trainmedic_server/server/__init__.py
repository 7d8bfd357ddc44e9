"""The HTTP API, which translates requests into calls of the engine and the history.

This package knows HTTP: sizes, encodings, tokens, errors, streams. It makes no decision about alerts, which
is the engine's work, and reads no setting, which wiring hands to `factory.create_app`.
"""
