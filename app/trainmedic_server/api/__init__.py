"""The routes of the HTTP API and the documents that they answer with."""
