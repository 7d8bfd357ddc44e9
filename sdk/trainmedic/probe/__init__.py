"""``trainmedic-probe``: how fast the ranks of nodes that do not train can speak with each other.

It measures what a training waits for, and nothing else: barriers, and all-reduces of a few sizes, among all ranks and
between the ranks of each two nodes. It is a program of its own (``python -m trainmedic.probe``), beside any training.
"""
