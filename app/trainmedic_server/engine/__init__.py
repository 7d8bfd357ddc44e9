"""The engine: from an alert to a finished, reverted and recorded repair. ``service`` is its interface."""
