"""GPU power limits with leases: ``gpu.power_limit`` and ``gpu.renew_lease``."""
