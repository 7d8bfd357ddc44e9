"""The server's composition root. Only this package builds adapters from settings, except for the simulation and
``cli.playbook``.
"""
