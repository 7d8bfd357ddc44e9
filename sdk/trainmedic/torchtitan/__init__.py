"""Trainmedic in a training by torchtitan's ``Trainer``::

    from torchtitan.train import main

    medic = trainmedic.connect(job="llm-1")
    trainmedic.torchtitan.protect(medic)
    main()

`protect` puts itself around the method ``train`` of the class; the configuration and torchtitan itself stay as they
are. Needs torch; torchtitan is imported when `protect` is called.
"""

from trainmedic.torchtitan.protecting import protect

__all__ = ["protect"]
