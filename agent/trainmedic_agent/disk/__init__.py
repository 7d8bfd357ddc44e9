"""Freeing of disk space by the policy's cleaning rules: the action ``disk.clean``.

- ``rules``: definition; ``executor``, ``cleaner``: execution; ``report``: output
- ``walk``, ``search``, ``checkpoints``: what matches
- ``open_files``, ``access_times``, ``read_watch``, ``place``: checks before a deletion
- ``removal``, ``checkpoint_removal``: deletion
"""
