"""The engine: from an alert to a finished, reverted and recorded repair.

``service`` is its interface. Pure decisions: ``admission``, ``guards``, ``plan``, ``step_sequence``, ``steps``,
``undoing``, ``lease_reapply``.
"""
