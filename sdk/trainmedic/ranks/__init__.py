"""How the ranks of a job come to carry out the same commands at the same call of `Medic.commands`.

Calls are counted from `trainmedic.distributed.share` on, and every rank makes the same ones. At certain calls, the
*sync points*, each rank reads one decision (``decisions``): it is the same for all, because the first that is written
stays. Rank 0 writes it ahead of time. Where it does not, whoever has waited too long writes that nothing is to be
done, and then nobody waits again until rank 0 is seen to move. Only where a decision holds commands do the ranks wait
for each other: each says which step it is at, and the agreed outcome lets all of them go on with a command, or none.

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

``share`` is what the training thread calls. ``synchronizer`` is the thread beside it. It works in one of two roles: the
``coordinator`` of rank 0, with ``membership`` for who is there, or the ``participant`` of every other rank. The ranks
write ``decisions`` (what is carried out at which sync point) and ``rounds`` (every rank says something, all read the
same conclusion) through ``shared_store``.

Not here: finding a store (``trainmedic.distributed``), commands before and after (``trainmedic.job.queue``), what
handlers see of it (``trainmedic.job.group``). Needs no PyTorch: a store is anything with four calls.
"""
