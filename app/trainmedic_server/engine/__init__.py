"""The engine: from an alert to a finished, reverted and recorded repair. ``service`` is its interface.

A delivery goes through ``intake`` and ``admission`` to ``workers``. Each run's ``driver`` plans (``plan``, ``steps``,
``undoing``), stores the plan, and carries it out (``performing``).
"""
