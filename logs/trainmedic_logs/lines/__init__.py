"""Reading of log lines and matching against rules. Pure; the agent and offline commands share it."""
