"""Messages over Redis of training jobs (``trainmedic.job``) and the node agent.

``receiver`` and ``writer`` are threads with a common ``connection``; ``envelope`` defines the messages.
"""
