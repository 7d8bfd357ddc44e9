"""Log reading on a node.

Lines go from ``files`` and ``kernel_log`` to ``rule_runner``, and findings through ``log_store`` to ``finding_sender``.
"""
