"""Authentication and authorization of requests, with ``GET /audit``."""
