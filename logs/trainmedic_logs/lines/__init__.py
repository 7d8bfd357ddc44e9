"""Reading of log lines and matching against rules. Pure."""
