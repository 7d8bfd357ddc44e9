"""Reading logs on a node: which files, from where on, line by line; what rules find in them goes to the server.

Loaded only where the policy has a ``logs`` part (``log_policy``, which reads that part, excepted). A line goes from a
`LineSource` (``files``, ``kernel_log``) through ``reader``, which has the rules look at it and writes down what they
find together with how far was read (``log_store``), to ``finding_sender``.
"""
