"""Every setting, once: ``server`` has those of ``trainmedic serve``, ``agent`` those of ``trainmedic agent``,
``options`` how one is given by a flag or a variable. The agent's need no pydantic, which would be a fifth of
its memory."""
