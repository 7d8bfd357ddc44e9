"""Every setting, once: ``server`` has those of ``trainmedic serve``, ``agent`` those of ``trainmedic agent``,
``sources`` how one is read from a flag or a variable. The agent's settings are read without pydantic, which would add
8 MB, a fifth, to its memory (``docs/decisions.md``)."""
