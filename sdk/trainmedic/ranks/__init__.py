"""How the ranks of a job come to carry out the same commands at the same call of `Medic.commands`.

Calls are counted from `trainmedic.distributed.share` on, and every rank makes the same ones. At certain calls, the
*sync points*, each rank reads one decision (``decisions``): it is the same for all, because the first that is written
stays. Rank 0 writes it ahead of time. If it is late, the first rank whose patience is over writes that nothing is to be
done, and no rank waits again until rank 0's heartbeat shows that it has advanced. Only if a decision has commands do
the ranks wait for each other: each states its step, and the agreed outcome lets all of them carry out a command, or
none.

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

``share`` is what the training thread calls. ``synchronizer`` is the background thread. It works in one of two roles:
the ``coordinator`` of rank 0, with ``membership`` for which ranks live, or the ``participant`` of every other rank. The
ranks write ``decisions`` (what is carried out at which sync point) and ``rounds`` (every rank enters a value, and all
read the same conclusion) through ``shared_store``.

Not here: finding a store (``trainmedic.distributed``), commands before and after (``trainmedic.job.queue``), what
handlers see of it (``trainmedic.job.group``). PyTorch is not needed: a store is any object with four methods.
"""
