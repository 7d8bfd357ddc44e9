"""``trainmedic`` with leases of two seconds: a program for tests that cannot wait for minutes.

python hasty_server.py serve …
"""

from __future__ import annotations

import sys
from datetime import timedelta

from trainmedic_core.command import main
from trainmedic_server.actions.nodes import GpuPowerLimit
from trainmedic_server.engine import lease_recovery, leases

LEASE = timedelta(seconds=2)

if __name__ == "__main__":
    GpuPowerLimit.lease = LEASE
    leases.RENEW_EVERY = LEASE / 15
    lease_recovery.RESENT_AFTER = LEASE / 4
    main(sys.argv[1:], prog_name="trainmedic")
