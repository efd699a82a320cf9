"""Quantised safetensors: one file per format, each of which keeps weights in the blocks of `pallas_kernels.linear`."""
