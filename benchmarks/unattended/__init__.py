"""A hundred faults in one training run without people: the cost.

A small transformer is trained on the CPU, three times with the same seed: without faults (``calm``), with a hundred of
fourteen kinds until it is dead (``alone``), and with the same hundred and Trainmedic (``medic``): on four ranks of two
nodes, each started by ``trainmedic-run -- torchrun``, with in-memory checkpoints, real Prometheus and Alertmanager and
``trainmedic serve`` with its Redis, and the shipped rules and playbooks.
"""
