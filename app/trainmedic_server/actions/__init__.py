"""Actions of playbooks. ``registry`` lists them; most send ``commands`` to jobs and nodes."""
