"""The engine: what happens between an alert and a finished, undone, recorded repair.

Deciding is pure and lives in ``matching``, ``guards``, ``admission`` (may a run start?), ``scope``
and ``plan`` (what does a run do next?). Acting lives in ``intake`` (deliveries), ``recorder``
(commits), ``driver`` (one run), ``workers`` (all of them), ``silent_alerts`` (alerts nobody resolves).
``service`` is what the rest of the program sees.
"""
