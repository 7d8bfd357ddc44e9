"""Approval questions in Slack with buttons, by Socket Mode. Imported only if Slack is set: it needs an extra."""
