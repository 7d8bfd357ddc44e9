"""Agreement of a job's ranks on the same commands at the same call of `Medic.commands`.

At *sync points* each rank reads one decision, usually written in advance by rank 0; the first one counts. A late one is
replaced by an empty one; ranks wait only for the first late one. They wait for each other only at decisions with
commands: each states its step, and all or none carry one out.

::

    rank 0                                            every other rank

    command queue                                     training thread
          |                                                 |  tick
    coordinator    decides, lets the ranks agree,         share
          |        gathers their outcomes                   |
    synchronizer   one thread per rank, which         synchronizer
          |        alone touches the store                  |  role: participant
          +------------------ shared store -----------------+
"""
