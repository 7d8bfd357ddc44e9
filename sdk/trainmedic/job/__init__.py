"""A training job's commands, from arrival to reply, and its reports."""
