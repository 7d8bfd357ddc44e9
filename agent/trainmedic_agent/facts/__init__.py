"""Facts for ``node.facts``."""
