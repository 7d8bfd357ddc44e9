"""Log lines from Loki, VictoriaLogs, Elasticsearch or OpenSearch. Labels and fields: ``docs/how-to/log-stores.md``."""
