"""The node agent: carries out the commands that are for its node, and bounds what any command may do.

``command_runner`` lets commands in, ``journal`` writes them down, ``worker_queues`` bring each to its executor
(``executors``), and ``replies`` answers. The executors are in ``power``, ``disk`` and ``facts``.

The agent is plain threads and the synchronous Redis client, so that it costs its node little; it imports none of the
server's libraries, and a test in ``tests/architecture`` holds it to that.
"""

__version__ = "0.1.0"
