"""Shipping of log lines to Loki or VictoriaLogs, loaded only if the policy has ``logs.ship``.

The files are the buffer: a file is read further once the store has accepted earlier lines, so an unavailable store
consumes no space and delays no finding. Lines deleted too early, or refused, are counted.
"""
