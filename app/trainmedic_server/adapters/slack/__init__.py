"""Approval questions in Slack. Needs an extra, so it is imported only if Slack is set."""
