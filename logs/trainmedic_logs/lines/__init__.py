"""Reading of log lines and matching against rules, for agent and offline commands. Pure."""
