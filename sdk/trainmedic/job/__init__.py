"""A training job's commands and reports.

A command goes from ``wire/receiver`` through ``queue``, at a step's end (``torch/boundary``), to ``handlers``, which
calls the framework's; its answer through ``queue`` to ``wire/writer``.
"""
