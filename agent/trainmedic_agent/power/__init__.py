"""GPU power limits with leases.

- ``caps``: desired limits, as values; ``ledger``: their persistence
- ``control``: application to the driver; ``lease_expiry``: end of unrenewed caps
- ``executors``, ``outputs``: the actions ``gpu.power_limit`` and ``gpu.renew_lease``
"""
