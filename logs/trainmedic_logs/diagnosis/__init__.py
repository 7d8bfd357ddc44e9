"""Diagnosis: from facts to a verdict on the origin and cause of a failure. Pure."""
