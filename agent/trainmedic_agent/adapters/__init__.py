"""GPUs by NVML."""
