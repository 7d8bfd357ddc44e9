"""Log lines from a store: Loki, VictoriaLogs, or Elasticsearch and OpenSearch. Their labels and fields are in
``docs/how-to/log-stores.md``.
"""
