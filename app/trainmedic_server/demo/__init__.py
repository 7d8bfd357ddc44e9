"""A self-contained demonstration with simulated GPU nodes and real small trainings, on loopback only."""
