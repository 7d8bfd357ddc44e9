"""Playbooks as they are written: reading, checking, compiling and reloading them.

``yaml_text`` reads YAML with positions, ``compiler`` turns a document into a ``compiled_playbook``, ``loader`` reads
a file with its ``attachments``, and ``library`` keeps the playbooks of some directories. ``matchers`` say which alerts
a playbook takes, ``scope_check`` which names an expression in it can use; the expressions themselves are the package
``expressions`` below. ``model_errors`` has the words for values that do not fit, ``schema`` the JSON Schema for
editors. Problems are values (``trainmedic_core.problems``), all of a file's at once.
"""
