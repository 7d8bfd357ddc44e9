"""Link between the agent and the log reader, an unprivileged process without keys or Redis access.

A hostile reader cannot flood the agent: each of its messages is an answer or awaits an acknowledgement.
"""
