"""The node agent: carries out the commands that are about its node, and bounds what any command may do.

``orders`` is what a command looks like to a hand that carries it out, ``journal`` what the agent remembers
over restarts. The agent is plain threads and the synchronous Redis client, so that it costs its node little;
it imports none of the server's libraries, and a test in ``tests/architecture`` holds it to that.
"""
