"""Actions on Kubernetes: ``k8s.*``."""
