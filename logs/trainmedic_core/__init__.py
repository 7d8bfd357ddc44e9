"""What server, node agent and the reading of logs share: targets, durations, YAML with positions, bounded expressions,
and the command ``trainmedic``.

It comes in the distribution trainmedic-logs, and imports the SDK alone.
"""

__version__ = "0.1.0"
