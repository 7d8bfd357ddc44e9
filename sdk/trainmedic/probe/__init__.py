"""``trainmedic-probe``: latency and bandwidth between idle nodes, by barriers and all-reduces among all ranks and each
two nodes.
"""
