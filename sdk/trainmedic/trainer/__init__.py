"""What Trainmedic does in a training whose loop a framework runs, the same for every framework.

``framework`` is what a framework has to offer. ``loop`` restarts its loop, ``attachment`` carries out commands between
two steps, and ``self_saving`` is for frameworks that have no callbacks and write checkpoints by themselves.
"""
