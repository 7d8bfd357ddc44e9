"""Trainmedic's server: from an Alertmanager webhook to a verified, reversible, recorded repair."""

__version__ = "0.1.0"
