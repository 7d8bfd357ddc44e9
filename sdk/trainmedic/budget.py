"""The rollback budget, by the name under which scripts import it; the code is in ``recovery.rollback_budget``."""

from trainmedic.recovery.rollback_budget import FILE, LIMIT, RollbackBudget
from trainmedic.recovery.rollback_budget import RollbackCount as Spent

__all__ = ["FILE", "LIMIT", "Budget", "Spent"]


class Budget(RollbackBudget):
    """`RollbackBudget`, with the name by which scripts may call its method."""

    renew = RollbackBudget.reset
