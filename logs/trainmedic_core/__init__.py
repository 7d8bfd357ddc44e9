"""Shared base of server, agent and log reading."""

__version__ = "0.1.0"
