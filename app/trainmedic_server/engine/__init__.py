"""The engine: what happens between an alert and a finished, undone, recorded repair.

Deciding is pure: ``admission`` and ``guards`` (does a run start?), ``plan`` with ``step_sequence``, ``steps`` and
``undoing`` (what does it do next?), ``scope`` (the names in its expressions), ``plan_values`` (what these take and
return), ``set_again`` (may an expired effect come back?). Acting: ``intake`` (deliveries), ``recorder`` (commits),
``workers`` (all runs), ``driver`` (one run and its attempts), ``locks`` (targets), ``leases`` and ``lease_recovery``
(effects that must be renewed), ``batching`` (requests), ``silent_alerts`` (alerts without reports), ``topology_watch``
(where jobs run). ``service`` is what the rest of the program sees.
"""
