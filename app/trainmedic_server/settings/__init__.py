"""Settings of ``trainmedic serve``. The agent has its own (`trainmedic_agent.settings`), without pydantic, which would
add 8 MB to its memory (``docs/decisions.md``).
"""
