"""Agreement of a job's ranks to carry out the same commands at the same call of `Medic.commands`.

Calls are counted from `trainmedic.distributed.share` on. At certain calls, the *sync points*, each rank reads one
decision, usually written by rank 0 in advance. The first one written counts. If it is late, the first rank whose
patience is over writes an empty one, and no rank waits again until rank 0's heartbeat has advanced. Only for decisions
with commands the ranks wait for each other: each states its step, and by the agreed outcome all or none carry out a
command.

::

    rank 0                                            every other rank

    command queue                                     training thread
          |                                                 |  tick
    coordinator    decides, lets the ranks agree,         share
          |        gathers their outcomes                   |
    synchronizer   one thread per rank, which         synchronizer
          |        alone touches the store                  |  role: participant
          +------------------ shared store -----------------+
                   keys in the ranks' common store

PyTorch is not needed: a store is any object with four methods.
"""
