"""Link between the agent and the log reader, an unprivileged process without keys or Redis access.

Each message of the reader answers one of the agent's or awaits an acknowledgement, so a hostile reader cannot flood the
agent.
"""
