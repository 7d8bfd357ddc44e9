"""Shared base of server, agent and log reading: targets, durations, YAML with positions, bounded expressions, and the
command ``trainmedic``. It imports only the SDK.
"""

__version__ = "0.1.0"
