"""The HTTP API: from requests to calls of the engine and the history, and back.

Here: what is spoken on the wire (sizes, encodings, tokens, errors, streams). Not here: any decision
about alerts, which is the engine's, and any setting, which wiring hands to `factory.create_app`.
"""
