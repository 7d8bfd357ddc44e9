"""Shipping lines to a store: the agent pushes what it may read to Loki, or to VictoriaLogs, which takes the same.

Loaded only where the policy has ``logs.ship`` (``ship_policy``, which reads that part, excepted). The files themselves
are the buffer: a file is read on when the store has taken what was read of it before, and how far it has is written
down. So nothing else grows where a store is away, and reading for findings, which has positions and threads of its own,
does not notice. What ends too soon for that, and what the store refuses, is lost and counted.

``shipped_file`` and ``shipped_kernel`` give out lines; ``entries`` puts times, labels and masks on them; ``shipper``
merges them by time into batches, and ``store_push`` pushes those.
"""
