"""Shipping of log lines to Loki or VictoriaLogs. Loaded only if the policy has ``logs.ship`` (except ``ship_policy``).

The files themselves are the buffer: a file is read further once the store has accepted earlier lines. So an unavailable
store neither consumes space nor delays findings. Lines deleted too early, or refused by the store, are counted.
"""
