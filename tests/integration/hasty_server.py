"""``trainmedic`` with leases of `LEASE`, or ``LEASE_SECONDS``: a program for tests that cannot wait for minutes.

python hasty_server.py serve …
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from trainmedic_core.command import main
from trainmedic_server.actions.nodes import GpuPowerLimit
from trainmedic_server.engine import lease_recovery, leases

LEASE = timedelta(seconds=2)

if __name__ == "__main__":
    lease = timedelta(seconds=float(os.environ.get("LEASE_SECONDS", LEASE.total_seconds())))
    GpuPowerLimit.lease = lease
    leases.RENEW_EVERY = lease / 15
    lease_recovery.RESENT_AFTER = lease / 4
    main(sys.argv[1:], prog_name="trainmedic")
