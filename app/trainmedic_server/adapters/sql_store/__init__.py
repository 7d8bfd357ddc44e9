"""Run store on SQL: SQLite, or PostgreSQL shared by several servers."""
