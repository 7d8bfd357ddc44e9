"""The server's composition root. Only this package builds adapters from settings. The simulation and ``cli.playbook``,
which need no server, build the few that they use.
"""
