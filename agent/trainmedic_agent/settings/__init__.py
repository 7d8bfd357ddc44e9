"""Settings of the agent and of its log reader."""
