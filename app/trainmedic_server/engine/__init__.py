"""The engine: from an alert to a finished, reverted and recorded repair. ``service`` is its interface.

A delivery goes from ``http/factory`` and ``api/webhook`` through ``intake`` and ``admission`` (with
``first_plans``) to ``workers``. A run's
``driver`` plans (``plan``, ``steps``, ``undoing``), stores the plan, and calls the action (``performing``). Commands
leave by ``actions/commands`` and ``adapters/redis_bus``.
"""
