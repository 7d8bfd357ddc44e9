"""The node agent: executes commands for its node, within the bounds of the node's policy.

It uses threads and the synchronous Redis client, and none of the server's libraries, to stay small.
"""

__version__ = "0.1.0"
