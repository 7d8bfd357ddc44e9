"""The link between the agent, which acts, and the reader of logs, which is a process of its own.

The reader parses logs, dumps and directories. It has no key of the node and no password of Redis. The agent sends it
the policy, the rules and searches, and gets findings, pages of lines and metrics back. Every message of the reader
answers a message of the agent or waits for an acknowledgement, so a hostile reader cannot flood the agent.

`frames` and `messages` define the link. `reader_link` is the agent's end, `agent_session` is the reader's end.
"""
