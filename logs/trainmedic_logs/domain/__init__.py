"""Values and pure functions of findings, log lines and verdicts."""
