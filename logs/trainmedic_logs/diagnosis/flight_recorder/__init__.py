"""PyTorch's flight recorder dumps, untrusted pickles, parsed in a confined process."""
