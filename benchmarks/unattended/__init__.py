"""A hundred faults in one training run, and nobody there: what does it cost?

A small transformer is trained on the CPU, three times with the same seed: without faults (``calm``), with a hundred of
fourteen kinds until it is dead (``alone``), and with the same hundred and Trainmedic (``medic``): on four ranks of two
nodes, each started by ``trainmedic-run -- torchrun``, with in-memory checkpoints, real Prometheus and Alertmanager and
``trainmedic serve`` with its Redis, and the shipped rules and playbooks. Here: ``corpus`` (the text), ``faults``
(which, when, and how they are done), ``intruder`` (those from outside the job), ``trainer`` (one rank, a process of its
own), ``journal`` (what it writes down), ``stack`` (what looks after it), ``arms`` (the three, with their processes),
``phases`` (what came of each fault), ``__main__`` (the report).
"""
