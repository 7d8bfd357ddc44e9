"""Demonstration with simulated GPU nodes and real small trainings, on loopback."""
