"""Composition roots of the agent."""
