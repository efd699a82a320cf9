"""Run jax-triton's SwiGLU in Triton's interpreter, on numpy arrays; a process of its own, since Triton asks once.

Prints the largest error of each call relative to its largest number. bfloat16 is left out: the interpreter multiplies
its bits as integers.
"""

import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
from triton.runtime import interpreter

from pallas_kernels.swiglu import jax_triton

EPS = 1e-5


class Pointer:
    """An array as the interpreter takes it, which knows torch's tensors."""

    dtype = "fp32"

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data


def error(T, D, F, normed):
    rng = np.random.default_rng(T)
    x, scale = rng.normal(size=(T, D)).astype(np.float32), rng.normal(size=D).astype(np.float32)
    weight = (rng.normal(size=(2 * F, D)) / np.sqrt(D)).astype(np.float32)
    out, blocks = np.full((T, F), np.nan, np.float32), jax_triton.choose_blocks(T, D, F, 4)
    jax_triton._run_program[(triton.cdiv(F, blocks.columns),)](
        *map(Pointer, (x, weight, scale, out)), normed=normed, eps=EPS, T=T, D=D, F=F, block_t=blocks.rows,
        block_f=blocks.columns, block_k=blocks.inputs,
    )  # fmt: skip
    rows = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * scale if normed else x
    gate, up = np.split(rows @ weight.T, 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    return np.abs(out - exact).max() / np.abs(exact).max()


if __name__ == "__main__":
    # Arrays are where they are: nothing has to come from a device.
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, named: (arguments, named)
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None
    for shape, normed in itertools.product([(3, 100, 83), (1, 256, 64), (40, 192, 96)], [True, False]):
        print(error(*shape, normed))
