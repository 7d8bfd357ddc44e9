"""Step time, waiting and gradients, without device synchronization."""
