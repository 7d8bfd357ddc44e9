"""The node agent: executes commands for its node within its policy. To stay small, it uses none of the server's
libraries.
"""

__version__ = "0.1.0"
