"""What is shown as it happens: events, log lines, and who is connected now."""
