"""The interface between the agent and its node's GPUs."""
