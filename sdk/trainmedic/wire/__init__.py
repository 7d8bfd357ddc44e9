"""Messages over Redis: their form, and the threads that read and write them.

Everything that a receiver of commands needs, whatever it does with them: a training job (``trainmedic.job``) and the
node agent, which imports nothing else of this package.
"""
