"""The settings of the agent and of its reader of logs."""
