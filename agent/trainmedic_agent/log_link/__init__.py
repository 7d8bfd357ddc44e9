"""Link between the agent (``agent_end``) and the log reader (``reader_end``), a process without keys or rights.

A hostile reader cannot flood the agent: each of its messages is an answer or awaits an acknowledgement.
"""
