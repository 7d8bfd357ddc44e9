"""Live data: events, log lines, and connected agents and jobs."""
