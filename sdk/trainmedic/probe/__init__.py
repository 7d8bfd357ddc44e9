"""``trainmedic-probe``: latency and bandwidth between the ranks of nodes that do not train.

Measures barriers and all-reduces among all ranks and between each two nodes.
"""
