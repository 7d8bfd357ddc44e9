"""Log reading on a node: which files, from where, line by line, and what the rules find in them.

Loaded only if the policy has a ``logs`` part (except ``log_policy``). Lines go from ``files`` and ``kernel_log`` to
``rule_runner``, which stores findings together with read positions (``log_store``), and from there to
``finding_sender``.
"""
