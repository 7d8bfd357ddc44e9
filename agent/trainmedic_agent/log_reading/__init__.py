"""Log reading on a node, loaded only if the policy has a ``logs`` part.

Lines go from ``files`` and ``kernel_log`` to ``rule_runner``, and findings through ``log_store`` to ``finding_sender``.
"""
