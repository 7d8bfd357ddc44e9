"""Acting on Kubernetes: ``k8s.*``.

``notes`` is how a change is remembered on the object and taken back; ``base`` what all actions share;
``nodes``, ``drain`` and ``workloads`` are the actions.
"""
