"""How the ranks of a job come to carry out the same commands at the same step.

::

    rank 0                                          the other ranks

    reader -> desk                                  training thread
                |                                      |  tick, ask
              chair   calls commands up,             share
                |     gives the verdict,               |
     share -> courier gathers outcomes              courier      one thread per rank; it alone
                |                                      |         touches the store
                +--------------- board ----------------+         keys in the ranks' common store
                        decisions, rounds

``share`` is what the training thread calls: it counts calls of `Medic.commands` and looks, now and then, at what
was decided. ``courier`` is the thread beside it, ``chair`` what rank 0 does for all. What they write for each
other is in ``decisions`` (what is carried out at which look) and ``rounds`` (everybody says something, all read
the same conclusion), by way of ``board``.

Not here: finding a store (``trainmedic.distributed``), commands before and after (``trainmedic.job.queue``), what
handlers see of it (``trainmedic.job.group``). Needs no PyTorch: a store is anything with four calls.
"""
