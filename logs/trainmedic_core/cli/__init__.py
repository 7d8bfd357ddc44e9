"""What the commands of all distributions share: exit codes, tables, flags of settings."""
