"""The run store on SQL: SQLite, or PostgreSQL where several servers share it.

``store`` puts the parts together. ``writer`` commits in groups; ``transaction`` is what a unit of work sees,
``pending_writes`` what it has written so far, ``writer_cache`` what the writer remembers. ``history`` reads on
connections of its own. ``statements`` and ``queries`` are what both ask; ``lookup`` and ``bulk`` run long lists of
keys and rows. ``schema`` and ``mapping`` say how values lie in tables, ``migrations`` and ``revision`` how the tables
come about, ``prune`` deletes. ``database`` is SQLite's connections and errors; ``in_memory`` is the store without a
file, for the simulation. Of several servers on one PostgreSQL one works: ``postgresql`` has its session and lock,
``election`` waits for the lock, ``leadership`` says how long this server may rely on it.
"""
