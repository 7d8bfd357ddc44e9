"""The node agent: executes commands for its node within its policy.

It uses none of the server's libraries, to stay small.
"""

__version__ = "0.1.0"
