"""``trainmedic-run``, a launcher: starts a job's command, stores its output, restarts it after failures."""
