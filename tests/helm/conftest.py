"""The stand-in for the API server and what acts on it, as the tests of the actions have them."""

from tests.kubernetes.conftest import brief_refusal_grace, cluster, kubeconfig, stand_in, world

__all__ = ["brief_refusal_grace", "cluster", "kubeconfig", "stand_in", "world"]
