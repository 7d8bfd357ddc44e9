"""Messages over Redis of training jobs and the node agent.

``receiver`` and ``writer`` are threads with a common ``connection``.
"""
