"""Devices, sharding, compiled programs, transfers between meshes, traces."""
