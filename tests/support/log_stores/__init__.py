"""Stores of logs for tests: stand-ins that refuse what the real ones refuse, and how a line is put into either."""
