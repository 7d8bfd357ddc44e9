"""Search of this node's logs for ``logs.read``, where no store keeps them: ``file_lines`` reads one file, ``searcher``
merges files into a page, ``search_pages`` packs it. ``log_reading`` finds and opens files.
"""
