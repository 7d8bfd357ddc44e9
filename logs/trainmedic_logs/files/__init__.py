"""Reading of folders of logs and dumps, within limits."""
