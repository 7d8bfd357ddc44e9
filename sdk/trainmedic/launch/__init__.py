"""``trainmedic-run``: starts a job's launcher, stores its output, and restarts it after failures."""
