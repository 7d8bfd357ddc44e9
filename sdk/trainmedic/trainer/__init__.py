"""What the integrations of ``trainmedic.huggingface`` and ``trainmedic.lightning`` have in common.

Both frameworks have a Trainer that owns the loop, and callbacks by which others take part in it. Here are the
callback's and the loop's common halves. They use the learning rate of ``trainmedic.torch``, which no Trainer needs.
"""
