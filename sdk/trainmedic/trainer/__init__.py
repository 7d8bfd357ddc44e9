"""Integration of training loops that a framework runs, common to all frameworks."""
