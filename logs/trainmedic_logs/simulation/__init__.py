"""What log rules make of a file or of a test, without a server."""
