"""Playbooks as they are written: reading, checking, compiling and reloading them.

``yaml_text`` reads YAML with positions, ``compiler`` turns a document into a ``compiled_playbook``, ``loader`` reads
a file with its ``attachments``, and ``library`` keeps the playbooks of some directories. Two small languages are
inside a playbook: ``matchers`` with ``regexes``, and ``expressions`` with ``template_syntax``, ``sandbox``,
``work_meter`` and ``scope_check``. ``model_errors`` has the words for values that do not fit, ``schema`` the JSON
Schema for editors. Problems are values (``problems``), all of a file's at once.
"""
