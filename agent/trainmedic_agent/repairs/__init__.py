"""Repairs of a node within its policy: restarts of units and containers, GPU reset, reboot."""
