"""Freeing disk space on a node by the rules of the agent's policy: the action ``disk.clean``.

``rules`` says what a rule means, ``reading`` makes rules of the policy's text. For one command, ``cleaner``
goes through the rules that it names: ``roots`` opens their directories, ``walk`` goes through these,
``files`` and ``checkpoints`` find what is due, ``holders`` says whether somebody uses it, ``removal``
deletes or truncates it, ``space`` measures, ``pace`` keeps it gentle, ``report`` becomes the output.
``hand`` is what the agent calls.
"""
