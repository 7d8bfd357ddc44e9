"""Log reading on a node.

Lines go from ``files`` and ``kernel_log`` to ``rule_runner``, findings through ``log_store`` to ``finding_sender``. In
``log_link``, ``reader_end`` hands them to the agent's ``agent_end`` and ``finding_relay``, which adds them to Redis
for the server's ``engine.finding_intake``.
"""
