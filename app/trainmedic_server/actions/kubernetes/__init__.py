"""Acting on Kubernetes: ``k8s.*``.

``field_changes`` records a change on the object and takes it back; ``base`` is what all actions share;
``nodes``, ``drain`` and ``workloads`` are the actions.
"""
