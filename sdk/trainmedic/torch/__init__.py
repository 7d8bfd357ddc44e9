"""Stand-in until the package lands."""
