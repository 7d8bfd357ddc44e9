"""Where a loop's batches come from, and how each kind of source goes back to a position in them."""
