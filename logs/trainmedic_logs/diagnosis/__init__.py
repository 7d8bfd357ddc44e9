"""Diagnosis: from facts to a verdict on who began a failure, and why. Pure."""
