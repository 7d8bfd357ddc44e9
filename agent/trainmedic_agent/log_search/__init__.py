"""Answering what is asked of this node's logs, where no store keeps them: ``logs.read``.

``file_lines`` reads one file from a place on, ``searcher`` merges files into a page, ``executor`` answers the command.
Which files there are, and how they are opened, is ``log_reading``'s.
"""
