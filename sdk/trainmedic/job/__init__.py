"""A training job's part: its commands from their arrival to their reply, and what it reports of itself.

A command comes from ``trainmedic.wire.receiver`` into the ``queue``, is carried out by one of the ``handlers``, and its
outcome goes by the queue to ``trainmedic.wire.writer``; ``server_connection`` puts the three together. In a job of
several ranks ``trainmedic.ranks`` lets them agree, between queue and handlers. A ``command`` has typed ``parameters``,
and a ``group`` to agree in. What a job reports is in ``progress``, ``rank_stats`` and ``memory_usage``, and goes out by
``metrics``; ``interrupt`` gets the loop out of a step that hangs.
"""
