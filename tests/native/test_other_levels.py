"""Levels that most x86 machines do not run: Arm's in an emulator, AVX-VNNI's with an instruction of AVX-512.

Products give the bits of AVX2 at each of them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.native.build import ALL_LEVELS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fuzz_native  # noqa: E402

CASES = 40
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# The same sums as those of AVX-VNNI, of registers of 256 bits, on a machine with AVX-512 and VNNI.
LIKE_AVXVNNI = [
    *("-mavx512vl", "-mavx512vnni", "-U__AVX512F__", "-U__AVX512VNNI__", "-D__AVXVNNI__"),
    "-D_mm256_dpbusd_avx_epi32=_mm256_dpbusd_epi32",
]


@pytest.fixture(scope="module")
def levels():
    try:
        return fuzz_native.find_levels("none")
    except fuzz_native.UnavailableError as error:
        pytest.skip(str(error))


def digest(folder, compiler, options, run=()):
    """Build the cases of packed weights and run them; a digest of all results."""
    program = folder / f"fuzz{len(list(folder.iterdir()))}"
    defines = fuzz_native.QUICK_PARTS["packed"] + fuzz_native.QUICK_PARTS["attention"]
    command = [*compiler, *fuzz_native.FLAGS, "-O2", *options, *defines, str(fuzz_native.SOURCE), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([*run, str(program), "0", str(CASES)], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def bits_of_avx2(levels, tmp_path_factory):
    if "avx2" not in levels:
        pytest.skip("this machine does not run AVX2")
    return digest(tmp_path_factory.mktemp("avx2"), ["c++"], ALL_LEVELS["x86_64"]["avx2"])


@pytest.mark.slow
def test_avxvnni_gives_the_bits_of_avx2(levels, bits_of_avx2, tmp_path):
    if "vnni" not in levels:
        pytest.skip("this machine has no VNNI")
    assert digest(tmp_path, ["c++"], [*ALL_LEVELS["x86_64"]["avx2"], *LIKE_AVXVNNI]) == bits_of_avx2


@pytest.mark.slow
@pytest.mark.parametrize("level", ALL_LEVELS["aarch64"])
def test_arm_gives_the_bits_of_avx2(level, bits_of_avx2, tmp_path):
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip(f"{ARM_COMPILER} and {ARM_EMULATOR} are not installed")
    options = [*ALL_LEVELS["aarch64"][level], "-static"]
    assert digest(tmp_path, [ARM_COMPILER], options, [ARM_EMULATOR, "-cpu", "max"]) == bits_of_avx2
