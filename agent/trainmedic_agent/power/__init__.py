"""GPU power limits on this node, and their leases.

``caps`` says, as values, what limit a GPU should have and why; ``ledger`` keeps that over restarts; ``control``
brings the driver to it; ``executors`` are those of ``gpu.power_limit`` and ``gpu.renew_lease``, with their
``outputs``; ``lease_expiry`` ends caps that are not renewed.
"""
