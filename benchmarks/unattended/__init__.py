"""Twenty faults in one training run, and nobody there: what does it cost?

A small transformer is trained on the CPU, three times with the same seed: without faults (``calm``), with
twenty (``alone``), and with the same twenty and Trainmedic (``medic``), through real Prometheus,
Alertmanager and ``trainmedic serve``, with the shipped rules and playbooks. Here: ``corpus`` (the text),
``faults`` (which, when, and how they are done), ``trainer`` (one run, a process of its own), ``stack`` (what
looks after it), ``phases`` (what the history says about each fault), ``__main__`` (the arms and the report).
"""
