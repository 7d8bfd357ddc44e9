"""A training job's commands and reports."""
