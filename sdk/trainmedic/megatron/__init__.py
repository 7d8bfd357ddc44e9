"""Trainmedic in a training that Megatron-LM's ``pretrain()`` runs::

    medic = trainmedic.connect(job="llm-1")
    trainmedic.megatron.protect(medic)
    pretrain(...)

`protect` puts itself around four functions of the module ``megatron.training.training``; the script and Megatron-LM
itself stay as they are. Needs torch; Megatron-LM is imported when `protect` is called.
"""

from trainmedic.megatron.protecting import protect

__all__ = ["protect"]
