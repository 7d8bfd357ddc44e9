"""The stand-in for the API server and what acts on it, as the tests of the actions have them."""

from tests.kubernetes.conftest import brief_doubt, cluster, kubeconfig, stand_in, world

__all__ = ["brief_doubt", "cluster", "kubeconfig", "stand_in", "world"]
