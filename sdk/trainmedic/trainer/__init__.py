"""Integration of training loops that a framework runs."""
