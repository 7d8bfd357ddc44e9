"""Health of the node's parts: checks in levels, compared with the node's own record."""
