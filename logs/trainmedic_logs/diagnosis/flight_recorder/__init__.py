"""PyTorch's flight recorder dumps, untrusted pickles.

The unpickler refuses classes (`plain_pickle`), sizes are limited (`dump`), and parsing runs in a confined process.
"""
