"""Lines of logs: how they are read, what they say, and which rule takes them.

Pure: no file, clock or network is touched here. The agent feeds it what it reads, `logs explain` and `logs test` what
they are given, so that a rule which was tried offline does the same on a node.
"""
