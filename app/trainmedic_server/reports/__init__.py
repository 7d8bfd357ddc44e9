"""Reports on one job and on all jobs.

All modules except ``job_queries`` and ``compiling`` are pure. An unknown figure is None, and the report states why.
"""
