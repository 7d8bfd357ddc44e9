"""The web console: server-rendered pages of API answers, without external scripts."""
