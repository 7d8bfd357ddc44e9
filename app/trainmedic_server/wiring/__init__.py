"""The composition roots: ``server`` builds the server, ``agent`` the node agent. Nothing else reads settings or
builds adapters. Each imports its own process's libraries only."""
