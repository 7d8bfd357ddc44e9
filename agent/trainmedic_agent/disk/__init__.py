"""Freeing disk space on a node by the rules of the agent's policy: the action ``disk.clean``.

``rules`` says what a rule means and reads rules from the policy. The agent calls ``executor``, which checks a command
and hands it to ``cleaner``; this goes through the rules that the command names. ``filesystems`` opens their roots and
measures free space, ``walk`` goes through a root, ``search`` finds what matches, ``checkpoints`` knows checkpoint
directories, ``open_files`` says whether anybody uses a file, ``removal`` and ``checkpoint_removal`` delete or
truncate, after ``place`` has told that it is still where it was, ``throttle`` keeps it gentle, and ``report`` becomes
the output.
"""
