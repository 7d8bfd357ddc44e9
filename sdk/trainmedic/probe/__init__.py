"""``trainmedic-probe``: network latency and bandwidth among idle nodes."""
