"""Search of this node's logs for ``logs.read``, where no store keeps them."""
