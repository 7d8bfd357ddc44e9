"""The HTTP server: connections and their limits, request bodies, errors, streams, and standby."""
