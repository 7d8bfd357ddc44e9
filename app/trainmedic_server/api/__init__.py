"""Routes of the HTTP API and their documents."""
