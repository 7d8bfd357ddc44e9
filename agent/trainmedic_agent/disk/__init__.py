"""Freeing of disk space by the policy's cleaning rules: the action ``disk.clean``.

- ``rules``: definition of rules
- ``executor``, ``cleaner``: execution of a command
- ``filesystems``, ``mounts``: roots and free space
- ``walk``, ``search``, ``checkpoints``: what matches
- ``open_files``, ``access_times``, ``read_watch``, ``place``: checks that an entry is unused and in place
- ``removal``, ``checkpoint_removal``: deletion
- ``throttle``: load limit
- ``report``: output
"""
