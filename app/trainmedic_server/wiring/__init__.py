"""The composition roots: ``server`` builds the server, ``agent`` the node agent.

No other module builds adapters from settings; the simulation and ``cli.playbook``, which need no server, make
the few that they use. Each root imports only the libraries of its own process.
"""
