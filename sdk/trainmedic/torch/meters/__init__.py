"""Measurements of step time, waiting and gradients without device synchronization."""
