"""The node agent: executes commands for its node, within the bounds of the node's policy.

A command passes ``command_runner``, ``journal``, ``worker_queues``, an executor (``executors``) and ``replies``.

The agent uses threads and the synchronous Redis client to stay small. It imports none of the server's libraries
(checked in ``tests/architecture``).
"""

__version__ = "0.1.0"
