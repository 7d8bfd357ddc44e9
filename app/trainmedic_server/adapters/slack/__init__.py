"""Approval questions in Slack with buttons, by Socket Mode: the server opens the connection. Imported only if Slack is
set: it needs an extra.
"""
