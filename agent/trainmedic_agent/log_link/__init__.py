"""Link between the agent and the log reader, an unprivileged separate process.

The reader parses logs, dumps and directories, without keys or Redis access. It gets policy, rules and searches, and
returns findings, lines and metrics. Each of its messages answers one of the agent's or awaits an acknowledgement, so a
hostile reader cannot flood the agent. `reader_link` is the agent's end, `agent_session` the reader's.
"""
