"""The server's composition root. Besides, only the simulation and commands without a server use adapters."""
