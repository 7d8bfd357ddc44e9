"""``trainmedic-run``: starts a job's launcher, keeps what it says, and starts it again where it fails.

The parts: `guard` is a process of its own that owns the job's processes and ends with them; `attempt` runs the job
once; `causes` says what an attempt ended by and whether another is worth it; `supervisor` makes the attempts;
`server_link` tells the server.
"""
