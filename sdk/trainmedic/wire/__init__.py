"""Messages over Redis: their form, and the threads that read and write them.

A command comes in by ``receiver`` and its replies leave by ``writer``. Each of the two has a thread and a
``connection`` of its own; ``command_memory`` keeps what became of which command, ``envelope`` defines the messages.

Here is all that a receiver of commands needs, whatever it does with them: a training job (``trainmedic.job``) and
the node agent, which imports nothing else of this package.
"""
