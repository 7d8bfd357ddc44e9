"""Messages over Redis: their form, and the threads that read and write them.

A command comes in by ``receiver`` and its replies leave by ``writer``. Each of the two has a thread and a
``connection`` of its own; ``command_book`` says what is done with a command, ``command_memory`` keeps the outcome of
each in Redis, ``envelope`` defines the messages.

This package has all that a receiver of commands needs, whether it is a training job (``trainmedic.job``) or the node
agent. Beside it the agent uses ``trainmedic.settings`` only.
"""
