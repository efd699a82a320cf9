"""Weights that pass by: stores in host memory and on disk, and the ring of buffers between them and the devices."""
