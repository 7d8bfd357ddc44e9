"""What the engine needs of the outside, as interfaces. Adapters implement them; wiring hands them in.

A port says what holds, not how. Each has one contract suite in ``tests/contract`` which every
implementation passes, the fakes included.

Nothing is imported here, because the node agent uses ``gpus`` and the clock of ``outside`` and must stay small:
pydantic, which the ports of the engine bring along, would add 8 MB, a fifth, to its memory (``docs/decisions.md``).
"""
