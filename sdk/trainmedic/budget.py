"""Public names of ``recovery.rollback_budget``."""

from trainmedic.recovery.rollback_budget import FILE, LIMIT, RollbackBudget
from trainmedic.recovery.rollback_budget import RollbackCount as Spent

__all__ = ["FILE", "LIMIT", "Budget", "Spent"]


class Budget(RollbackBudget):
    renew = RollbackBudget.reset
