"""Benchmarks: each prints one figure and what it is divided by, and starts and ends what it needs.

Run from the root of the checkout, for example ``python -m benchmarks.webhook_throughput``.
"""
