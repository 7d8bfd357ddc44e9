"""The run store on SQL: SQLite, or PostgreSQL where several servers share it.

``store`` puts the parts together; ``writer`` commits in groups, ``transaction`` is what a unit of
work sees, ``pending`` what it has written so far, ``memo`` what the writer remembers, ``history``
reads on connections of its own, ``schema`` and ``mapping`` say how values lie in tables, and
``migrations`` how the tables come about. Of several servers on one PostgreSQL one works:
``postgresql`` has its session and lock, ``turn`` waits for it, ``tenure`` says how long it holds.
"""
