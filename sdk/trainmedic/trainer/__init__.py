"""The part of an integration that is alike for every framework with a Trainer of its own.

It stands between ``trainmedic.torch``, of which it uses the learning rate, and ``trainmedic.huggingface`` and
``trainmedic.lightning``, which build on it.
"""
