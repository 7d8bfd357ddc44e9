"""Removal of unused containers, images and build cache of a container engine: ``disk.prune_containers``.

`executor` checks the command. `kubelet` detects whether the node belongs to Kubernetes. `leftovers` selects what to
remove. `engine_api` is the client of the engine (Docker, or Podman's service). `policy` reads the part ``containers``
of the agent's policy.
"""
