"""Measurements of GPU kernels: what `tools/gpu_bench.py` and `tools/tune_kernels.py` share."""
