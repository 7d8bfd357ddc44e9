"""Settings of ``trainmedic serve``. The agent's (`trainmedic_agent.settings`) are without pydantic, to save 8 MB of
memory (``docs/decisions.md``).
"""
