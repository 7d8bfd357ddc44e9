"""Routes of the HTTP API and the documents that they return."""
