"""GPU power limits with leases: the actions ``gpu.power_limit`` and ``gpu.renew_lease``."""
