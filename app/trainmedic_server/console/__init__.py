"""The web console: server-rendered pages of API answers."""
