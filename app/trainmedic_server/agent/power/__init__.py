"""GPU power limits on this node, and their leases.

``holds`` says, as values, what limit a GPU should have and why; ``ledger`` keeps that over restarts; ``control``
brings the driver to it; ``hands`` are the actions ``gpu.power_limit`` and ``gpu.renew_lease``, and the keeper
that ends leases.
"""
