"""Step time, waiting and gradients, measured without device synchronization."""
