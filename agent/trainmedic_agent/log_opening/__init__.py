"""Opening of log files with the rights of the users who placed or named them."""
