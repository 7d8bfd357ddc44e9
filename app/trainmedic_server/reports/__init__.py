"""Reports on one job and on all jobs.

Only ``compiling``, ``curves``, ``job_queries`` and ``reported_figures`` are not pure. An unknown figure is None, and
the report states why.
"""
