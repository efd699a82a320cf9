"""The numerical checks of kernels, and what happens where a kernel or the native library fails its check."""

import re
import types

import jax
import numpy as np
import pytest
from kernel_cases import ALL_FORMATS, needs_native
from marks import quick_part

from pallas_kernels import kernel_check, native, registry, selection, self_check
from pallas_kernels.linear_sum import reference
from pallas_kernels.native import library
from pallas_kernels.registry import Kernels
from pallas_kernels.selection import choose
from pallas_kernels.swiglu import norm_swiglu, swiglu
from pallas_kernels.tree_attention import config, triton

INTERPRETER = Kernels("xla", "gpu", capability=(9, 0), interpret=True)


def swiglu_by_xla(x, gate_up, *norm):
    return norm_swiglu(x, norm[0], gate_up, norm[1]) if norm else swiglu(x, gate_up)


@pytest.mark.parametrize(
    "operation", quick_part(kernel_check.CHECKS, lambda name: name not in ("linear", "tree_attention"))
)
def test_the_check_of_gpu_kernels(monkeypatch, operation):
    """In the interpreter; a kernel whose result is off, that raises, or that takes no ordinary call, is found out."""
    if operation == "swiglu":
        # Its only kernel is jax-triton's, which runs in no interpreter here.
        stand_in = types.SimpleNamespace(supports=lambda *_: True, swiglu=swiglu_by_xla)
        monkeypatch.setattr(registry, "import_implementation", lambda *_: stand_in)
    if operation == "linear_sum":
        # Nor does this kernel as a whole.
        stand_in = types.SimpleNamespace(supports=lambda *_: True, linear_sum=reference.linear_sum)
        monkeypatch.setattr(registry, "import_implementation", lambda *_: stand_in)
    device = jax.devices()[0]
    find_failure = selection.find_failure.__wrapped__
    assert find_failure(operation, "triton", INTERPRETER, device) is None
    check = kernel_check.CHECKS[operation]._replace(expect=lambda *_: {"the result": np.float32([1])})
    broken = {"the result": np.float32([np.nan])}
    for changed, problem in (
        ({"takes": lambda *_: False}, "does not take .* of ordinary operands"),
        ({"run": lambda *_: broken}, "of a .* the result is off by nan"),
        ({"run": lambda *_: 1 / 0}, r"cannot be run \(ZeroDivisionError: division by zero\)"),
    ):
        monkeypatch.setitem(kernel_check.CHECKS, operation, check._replace(**changed))
        assert re.search(f"{operation} by triton .*{problem}", find_failure(operation, "triton", INTERPRETER, device))


def break_mask_bits(mask_bits, rows, word):
    """A causal mask in a tree's place."""
    return 32 * word + jax.numpy.arange(32)[None, :] <= rows.row[:, None]


def break_merge(call, numbers, largest, total, values, *, interpret):
    """The first part of the prefix in the place of all."""
    first = values[:, 0] / total[:, 0, :, None]
    return [first.reshape(call.K, call.T, call.G, call.H).swapaxes(0, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "broken"),
    [
        ("_unpack_bits", break_mask_bits),
        ("_merge", break_merge),
        ("_add_old_rows", lambda *arguments: arguments[-1]),
        ("_attend_prefix", lambda call, state, *_: state),
        ("_finite", lambda values: values),
    ],
)
def test_the_check_finds_broken_attention(monkeypatch, function, broken):
    """The check itself, of a kernel one of whose steps is wrong."""
    # That call alone, which is the quickest.
    check = kernel_check.CHECKS["tree_attention"]
    calls = tuple(each for each in check.calls if each.name == "a tree")
    monkeypatch.setitem(kernel_check.CHECKS, "tree_attention", check._replace(calls=calls))
    monkeypatch.setattr(triton, function, broken)
    difference = kernel_check.find_kernel_difference("tree_attention", "triton", INTERPRETER, jax.devices()[0])
    assert difference is not None and "of a tree " in difference


@pytest.mark.parametrize("multiprocessors", [132, 108, 64, 58])
def test_the_check_runs_what_decoding_runs(multiprocessors):
    """Parts of a prefix and their merge on every GPU; more rows than a block has, and than a word has bits."""
    chosen = {
        call.name: config.choose(
            "", multiprocessors, call.rows, call.group, call.width, kernel_check.SLOTS, kv_heads=kernel_check.HEADS,
            itemsize=kernel_check.DTYPES[call.dtype].itemsize,
        )
        for call in kernel_check.ATTENTION
    }  # fmt: skip
    assert all(sizes.splits > 1 for sizes in chosen.values())
    tree = kernel_check.ATTENTION[0]
    assert tree.rows > triton.WORD and tree.rows * tree.group > chosen[tree.name].block_q
    assert {call.dtype for call in kernel_check.ATTENTION} == {"bfloat16", "float32"}
    assert {call.width for call in kernel_check.ATTENTION} == {64, 128}


WARNING = "no native CPU kernels, decoding goes through XLA: "


def assert_falls_back(reason, warnings):
    """One warning however often XLA takes its place, and a refusal without any where it was asked for by name."""
    with pytest.raises(ValueError, match=f"^kernels 'cpu' cannot be used: .*{reason}"):
        choose("cpu", "cpu")
    assert warnings() == []
    for devices in (1, 2):
        assert choose("auto", "cpu", devices) == Kernels("xla", "cpu")
    (message,) = warnings()
    assert message.startswith(WARNING) and re.search(reason, message)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (None, None, "were not built when jaxspec was installed; install a C"),
        ("portable", b"not a library", "cannot be loaded"),
        ("avx512", None, "none was built for this machine"),
    ],
)
def test_without_a_library(monkeypatch, anew, warnings, tmp_path, name, content, reason):
    path = tmp_path / "cpu.so"
    path.write_bytes(content or b"")
    monkeypatch.setattr(library, "find", lambda: {name: path} if name else {})
    monkeypatch.setattr(library, "supported_levels", lambda paths: [level for level in paths if level == "portable"])
    assert_falls_back(reason, warnings)
    # A compiler is not what is missing where there is a file.
    assert library.load().level is None and library.load().problem.endswith("; reinstall jaxspec") == bool(content)
    # XLA and other platforms do not ask for it.
    assert choose("xla", "cpu") == Kernels("xla", "cpu")


@needs_native
@pytest.mark.parametrize("changed", [{"newest": np.int64(1)}, {"threads": np.float32(1)}, None])
def test_a_library_of_older_sources(monkeypatch, anew, warnings, changed):
    """Without an operation, or with operations of the right names that take other attributes."""
    if changed is None:
        monkeypatch.setattr(library, "TARGETS", (*library.TARGETS, "newest"))
        return assert_falls_back("cannot be loaded", warnings)

    def call(target, out, *operands, aliases=None, **attributes):
        return library.call(target, out, *operands, aliases=aliases, **attributes | changed)

    monkeypatch.setattr(native, "call", call)
    assert_falls_back("library cannot be run .*; reinstall jaxspec", warnings)
    assert "\n" not in selection.find_native_problem()


@needs_native
def test_the_check_does_not_depend_on_what_the_caller_set(anew):
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.disable_jit(True),
        jax.transfer_guard("disallow"),
    ):
        assert selection.find_native_problem() is None


@needs_native
@pytest.mark.parametrize("name", ["linear of q6_k", "tree_attention", "the cache's values"])
def test_a_library_that_fails_its_check(monkeypatch, anew, warnings, name):
    expect = self_check._expect

    def wrong(operands):
        expected = expect(operands)
        expected[name] = expected[name].copy()
        expected[name].flat[-1] += np.float32(0.01) * np.abs(expected[name]).max()
        return expected

    monkeypatch.setattr(self_check, "_expect", wrong)
    assert_falls_back(f"library fails its check: {name} is off by", warnings)


@needs_native
def test_the_check_covers_every_operation_and_format():
    text = " ".join(self_check._expect(self_check._make_operands()))
    for name in library.TARGETS:
        assert name in text
    for name in ALL_FORMATS[3:]:
        assert f"linear of {name}" in text and f"take_rows of {name}" in text
