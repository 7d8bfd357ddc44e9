"""Lines of logs from a store that keeps them: Loki, VictoriaLogs, or Elasticsearch and OpenSearch.

``paging`` is what all have in common; ``store_http`` speaks HTTP with them; each of the others writes queries for one
of them and reads its answers. Which labels and fields a store has of a line is in ``docs/how-to/log-stores.md``.
"""
