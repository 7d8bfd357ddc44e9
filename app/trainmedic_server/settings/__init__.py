"""Every setting, once: ``server`` has those of ``trainmedic serve``, ``agent`` those of ``trainmedic agent``,
``options`` how one is given by a flag or a variable. The agent's settings are read without pydantic, which would add
8 MB, a fifth, to its memory (``docs/decisions.md``)."""
