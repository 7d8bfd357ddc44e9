"""The composition roots of the agent: they build its parts and hand them in."""
