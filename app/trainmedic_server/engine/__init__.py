"""The engine: from an alert to a finished, reverted and recorded repair. The rest of the program uses ``service``.

Decisions are pure:

- ``admission``, ``guards``: whether a run starts
- ``plan``, ``step_sequence``, ``steps``, ``undoing``: next step of a run
- ``scope``, ``plan_values``: their inputs and outputs
- ``lease_reapply``: whether an expired effect may be reapplied

Actors:

- ``intake``: deliveries
- ``recorder``: commits
- ``workers``, ``driver``: all runs, one run
- ``locks``: targets
- ``leases``, ``lease_recovery``: effects that need renewal
- ``silent_alerts``: alerts without reports
- ``topology_watch``: locations of jobs
"""
