"""Stand-in until the client is written."""
