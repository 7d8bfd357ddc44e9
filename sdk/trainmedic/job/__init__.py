"""A training job's part: its commands from their arrival to their reply, and what it reports of itself."""
