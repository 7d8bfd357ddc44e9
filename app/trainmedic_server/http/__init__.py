"""HTTP itself: connections and their bounds, bodies, error answers, streams, and servers on standby."""
