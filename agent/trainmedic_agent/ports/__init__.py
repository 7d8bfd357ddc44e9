"""Interface to the node's GPUs."""
