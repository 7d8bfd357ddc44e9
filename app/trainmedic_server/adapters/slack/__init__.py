"""Approval questions in Slack, imported only if Slack is set: it needs an extra."""
