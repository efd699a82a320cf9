"""The logits processor for one row, in float64 with sorting, written for reading."""

import math
from collections.abc import Sequence

import numpy as np

from jaxspec.config import SamplingParams


def process_reference(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> np.ndarray:
    """The reference of `processors.process`, for one row.

    Args:
      logits: [V_padded]
      params: the knobs.
      prompt: token ids of the prompt.
      output: token ids generated so far.
      vocab_size: ids at or above it are padding.

    Returns:
      Log-probabilities, float64 [V_padded]; -inf where a token is removed, everywhere if no token is possible.
    """
    z = [float(x) for x in logits]
    for token in range(len(z)):
        # 0. What is not a number, or not a token, is impossible.
        if math.isnan(z[token]) or token >= vocab_size:
            z[token] = -math.inf
            continue
        # 1. Penalties and bias.
        count = list(output).count(token)
        if count or token in prompt:
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        z[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        z[token] += (params.logit_bias or {}).get(token, 0.0)

    # 2. Temperature; 0 is the caller's business.
    z = [x / (params.temperature or 1.0) for x in z]
    kept = {token for token in range(len(z)) if z[token] > -math.inf}
    if not kept:
        return np.full(len(z), -np.inf)

    # 3. Top-k: everything at least as large as the k-th largest.
    if 0 < params.top_k < len(kept):
        kth = sorted((z[token] for token in kept), reverse=True)[params.top_k - 1]
        kept = {token for token in kept if z[token] >= kth}

    # 4. Top-p: go down the survivors until the mass before a token reaches top_p; ties with the last one stay.
    if params.top_p < 1:
        p = _softmax(z, kept)
        before, lowest = 0.0, 1.0
        for token in sorted(kept, key=lambda token: p[token], reverse=True):
            if before >= params.top_p:
                break
            before, lowest = before + p[token], p[token]
        kept = {token for token in kept if p[token] >= lowest}

    # 5. Min-p: at least min_p times as probable as the most probable.
    p = _softmax(z, kept)
    largest = max(p.values())
    kept = {token for token in kept if p[token] >= params.min_p * largest}

    # 6. Log-softmax over what is left.
    top = max(z[token] for token in kept)
    log_total = math.log(math.fsum(math.exp(z[token] - top) for token in kept))
    return np.array([z[token] - top - log_total if token in kept else -math.inf for token in range(len(z))])


def _softmax(z: list[float], kept: set[int]) -> dict[int, float]:
    """Probabilities of the kept tokens."""
    top = max(z[token] for token in kept)
    mass = {token: math.exp(z[token] - top) for token in kept}
    total = math.fsum(mass.values())
    return {token: x / total for token, x in mass.items()}
