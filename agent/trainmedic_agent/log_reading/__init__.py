"""Log reading on a node.

Lines go from ``files`` and ``kernel_log`` to ``rule_runner``, findings through ``log_store`` to ``finding_sender``. It
hands them by ``log_link`` (``agent_session``) to the agent (``reader_link``, ``finding_relay``) and Redis.
"""
