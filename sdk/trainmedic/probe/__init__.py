"""``trainmedic-probe``: latency and bandwidth between idle nodes, among all ranks and each two nodes."""
