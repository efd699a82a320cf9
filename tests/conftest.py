"""Shared by all tests: eight CPU devices, a private compile cache, tiny models."""

import jax

# Before any backend starts. Eight devices let every tensor-parallel degree up to 8 run on any machine.
jax.config.update("jax_num_cpu_devices", 8)
