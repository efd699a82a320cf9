"""Frequencies of rotary position embeddings, with linear and Llama 3 scaling."""

import math

import numpy as np

from jaxspec.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:  # float32 [H / 2]
    """Radians per position of each rotated pair."""
    frequency = (1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    if rope.scaling == "linear":
        return frequency / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _scale_llama3(frequency, rope)
    return frequency


def _scale_llama3(frequency: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated."""
    wavelength = 2 * math.pi / frequency
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = frequency / rope.factor
    scaled = np.where(wavelength > longest, stretched, (1 - blend) * stretched + blend * frequency)
    return np.where(wavelength < shortest, frequency, scaled).astype(np.float32)
