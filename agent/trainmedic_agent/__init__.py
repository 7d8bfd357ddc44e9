"""The node agent: executes commands within its policy, without the server's libraries."""

__version__ = "0.1.0"
