"""Trainmedic's server: from an Alertmanager webhook to a verified, reversible, recorded repair.

The package's layers, from the top: ``cli`` > ``wiring`` > ``console``, ``api``, ``adapters`` > ``engine``,
``actions``, ``catalog`` > ``ports``, ``telemetry`` > ``domain`` > ``errors``. Imports point
downwards only; ``tests/architecture`` holds the tree to it.
"""

__version__ = "0.1.0"
