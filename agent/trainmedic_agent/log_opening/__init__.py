"""Opening of log files with the rights of the users who placed or named them.

- ``node_files``: the port; ``own_files``, ``guarded_files``: implementations
- ``placement``, ``rights``, ``thread_rights``: these users, and their rights
- ``opener``, ``opener_client``, ``opener_frames``: the privileged process
"""
