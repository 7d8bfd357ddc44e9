"""Reports: what a job's time, GPUs and failures came to, and those of all jobs.

Everything here but ``job_questions`` and ``compiling`` is pure: values in, values out. What is not known is None, and
the report says why not; no number is made up for it.
"""
