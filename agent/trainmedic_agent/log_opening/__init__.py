"""Opening of files whose paths a job's user may have chosen, with the rights of whoever placed or named them.

- ``node_files``: the port `NodeFiles` that all reading of logs uses
- ``own_files``: files opened with the rights of this process, for a process that serves one user
- ``guarded_files``: files opened with the rights of the users who placed or named them
- ``placement``, ``rights``, ``thread_rights``: which users these are, and how a thread takes their rights
- ``opener``, ``opener_client``, ``opener_frames``: the process that has the rights, apart from the one that reads
"""
