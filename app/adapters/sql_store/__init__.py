"""The run store on SQL: SQLite now, with nothing in the way of PostgreSQL.

``store`` puts the parts together; ``writer`` commits in groups, ``transaction`` is what a unit of
work sees, ``pending`` what it has written so far, ``memo`` what the writer remembers, ``history``
reads on connections of its own, ``schema`` and ``mapping`` say how values lie in tables, and
``migrations`` how the tables come about.
"""
