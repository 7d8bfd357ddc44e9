"""Shipping of log lines to Loki or VictoriaLogs.

The files are the buffer: a file is read further once the store has accepted earlier lines, so an unavailable store
consumes no space and delays no finding. Lost lines are counted.
"""
