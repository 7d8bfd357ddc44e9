"""Playbooks as they are written: reading, checking, compiling and reloading them.

``yaml_text`` reads YAML with positions, ``compiler`` turns a document into a ``book``, ``library``
keeps the books of some directories. ``expressions``, ``scope_check``, ``matchers`` and ``regexes``
are the small languages inside a playbook. Problems are values (``problems``), all of a file's at once.
"""
