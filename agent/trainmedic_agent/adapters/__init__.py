"""GPU adapters for NVML."""
