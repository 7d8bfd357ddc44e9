"""Link between the agent and the log reader, an unprivileged separate process without keys or Redis access.

Each message of the reader answers one of the agent's or awaits an acknowledgement, so a hostile reader cannot flood the
agent. `reader_link` is the agent's end, `agent_session` the reader's.
"""
