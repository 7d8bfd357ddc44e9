"""Going back and going on: checkpoints, restarts, how many rollbacks a job may take, and what commands have changed."""
