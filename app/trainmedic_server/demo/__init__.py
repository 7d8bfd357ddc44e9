"""A self-contained demonstration: server, alerts, simulated GPU nodes and real small trainings, on loopback only."""
