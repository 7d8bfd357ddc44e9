"""Shared base of server, agent and log reading. It imports only the SDK."""

__version__ = "0.1.0"
