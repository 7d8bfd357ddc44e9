"""Removing what a container engine keeps and nobody uses: ``disk.prune_containers``.

`executor` checks the command, `kubelet` says whether Kubernetes runs this node, `leftovers` chooses what may go,
`engine_api` speaks with the engine (Docker, or Podman's service), and `policy` has the part ``containers`` of the
agent's policy.
"""
