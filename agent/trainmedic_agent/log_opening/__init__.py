"""Opening of log files, whose paths users may have chosen, with the rights of the users who placed or named them.

- ``node_files``: the port `NodeFiles`
- ``own_files``: files opened with this process's rights
- ``guarded_files``: files opened with the rights of the users who placed or named them
- ``placement``, ``rights``, ``thread_rights``: these users, and how a thread takes their rights
- ``opener``, ``opener_client``, ``opener_frames``: the privileged process, separate from the reading one
"""
