"""The engine: from an alert to a finished, reverted and recorded repair. The rest of the program uses ``service``.

- Pure decisions: ``admission``, ``guards``, ``plan``, ``step_sequence``, ``steps``, ``undoing``, ``lease_reapply``
- Actors: ``intake``, ``recorder``, ``workers``, ``driver``, ``locks``, ``leases``, ``lease_recovery``,
  ``silent_alerts``, ``topology_watch``
"""
