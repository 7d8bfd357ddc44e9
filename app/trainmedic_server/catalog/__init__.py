"""Playbooks as they are written: reading, checking, compiling and reloading them.

``yaml_text`` reads YAML with positions, ``compiler`` turns a document into a ``compiled_playbook``, ``loader`` reads
a file with its ``attachments``, and ``library`` keeps the playbooks of some directories. ``expressions``,
``scope_check``, ``matchers`` and ``regexes`` are the small languages inside a playbook, ``model_errors`` the words for
values that do not fit, ``schema`` the JSON Schema for editors. Problems are values (``problems``), all of a file's at
once.
"""
