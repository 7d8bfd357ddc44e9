"""Messages over Redis of training jobs and the node agent."""
