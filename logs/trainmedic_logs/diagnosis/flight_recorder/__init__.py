"""PyTorch's flight recorder dumps, untrusted pickles: the unpickler refuses classes (`plain_pickle`), sizes are limited
(`dump`), and parsing runs in a confined process (``trainmedic_logs.files.dump_reader``).
"""
