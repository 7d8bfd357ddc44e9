"""Search of this node's logs for ``logs.read``, where no store keeps them. ``log_reading`` finds and opens files."""
