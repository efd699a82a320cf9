"""Weights kept as a checkpoint holds them, in blocks and in half formats, from the file to the devices and back."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize as quantize_rows
from make import tiny_config, write_gguf, write_hf
from marks import fast_part

from jaxspec.checkpoint import convert as module
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.load import open_weights
from jaxspec.checkpoint.native import write as native_write
from jaxspec.checkpoint.native.checkpoint import read_leaf
from jaxspec.checkpoint.native.manifest import open_native
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.loading import OpenModels
from jaxspec.methods.core.round import Models
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.params import declare_leaves
from jaxspec.models.quantization import PARTS, Storage, decode_blocks, parts_of, restrict_storage, weight_leaves
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.offload.layout import layer_layouts
from jaxspec.runtime.mesh import MeshPlan, plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.sharding import collect_declared
from pallas_kernels.linear import reference
from pallas_kernels.linear.blocks import FORMATS, Blocks
from pallas_kernels.linear.columns import columns_name
from pallas_kernels.registry import Kernels

Kind = GGMLQuantizationType

# Rows of whole 256-value blocks; the heads of one KV head are half of one.
WIDE = tiny_config(embed_dim=256, mlp_dim=768, head_dim=64)


def medium(name):
    """A Q4_K_M file: values and down projections of the first layer in Q6_K."""
    if "layers.0" in name and name.endswith(("v_proj.weight", "down_proj.weight")) or "embed" in name:
        return Kind.Q6_K
    return Kind.Q4_K


def motley(name):
    """Whatever can differ, differs: keys in halves, a type that is not kept, gate and up apart."""
    kinds = {"k_proj": Kind.F16, "v_proj": Kind.BF16, "up_proj": Kind.Q8_0, "down_proj": Kind.Q5_1, "lm_head": Kind.F16}
    return next((kind for part, kind in kinds.items() if part in name), Kind.Q4_0)


CASES = {
    "q8_0": (tiny_config(), Kind.Q8_0),
    "q4_0": (tiny_config("qwen2"), Kind.Q4_0),
    "q4_1": (tiny_config("qwen3", tied=True), Kind.Q4_1),
    "q5_0": (tiny_config("mistral", tied=True), Kind.Q5_0),
    "q4_k": (WIDE, Kind.Q4_K),
    "q6_k": (dataclasses.replace(WIDE, family="qwen3", qk_norm=True, head_dim=128), Kind.Q6_K),
    "medium": (dataclasses.replace(WIDE, tied=True), medium),
    "motley": (tiny_config(), motley),
    "f16": (tiny_config(), Kind.F16),
    "bf16": (tiny_config("qwen2"), Kind.BF16),
}


@pytest.fixture(params=CASES, scope="module")
def file(request, tmp_path_factory):
    cfg, kind = CASES[request.param]
    return write_gguf(tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf", cfg, qtype=kind)


@pytest.fixture
def converted(tmp_path):
    """Convert without a tokenizer."""
    return lambda src, name="native", **options: convert(src, tmp_path / name, **options)


@pytest.fixture(scope="module")
def q8_native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("q8")
    return convert(write_gguf(folder / "m.gguf", tiny_config(), qtype=Kind.Q8_0), folder / "native").path


def place(weights, degree, own=True):
    plan = plan_mesh(degree)
    return Placement(weights.config, plan, np.dtype("float32"), 0, None, weights.storage(plan) if own else None)


def host_numbers(leaf):
    """The numbers of one weight, its last dimensions still apart where they are in blocks."""
    if isinstance(leaf, dict):
        return np.concatenate([host_numbers(leaf[part]) for part in PARTS], axis=1)
    if isinstance(leaf, Blocks):
        data = np.asarray(leaf.data)
        return decode_blocks(data, leaf.format).reshape(*data.shape[:-2], -1)
    return np.asarray(leaf).astype(np.float32)


def by_name(params):
    """Top leaves and those of the layers, every weight one of them."""
    layers = {f"layers.{i}.{name}": leaf for i, layer in enumerate(params["layers"]) for name, leaf in layer.items()}
    return {name: leaf for name, leaf in params.items() if name != "layers"} | layers


def check_equal_numbers(kept, plain, cfg):
    """Both hold the same numbers, and zeros wherever a mesh made either larger than the model."""
    shapes = {name: info.shape for name, info in declare_leaves(cfg, np.float32).items()}
    plain = by_name(plain)
    for name, leaf in by_name(kept).items():
        expected = np.asarray(plain[name])
        numbers = host_numbers(leaf)
        if name.endswith("out"):
            numbers = numbers.reshape(cfg.embed_dim, -1, *shapes[name][2:])
        inner = tuple(slice(n) for n in shapes[name])
        np.testing.assert_array_equal(numbers[inner], expected[inner], err_msg=name)
        for padded in (numbers.copy(), expected.copy()):
            padded[inner] = 0
            assert not padded.any(), name


def check_placed(params, placement):
    """Shapes, dtypes and shardings are those that programs are compiled for."""

    def check(leaf, target):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (target.shape, target.dtype, target.sharding)

    jax.tree.map(check, params, placement.params())


def stored_arrays(checkpoint):
    return [read_leaf(checkpoint, name) for name in checkpoint.infos]


def check_same(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), first, second)


@pytest.mark.parametrize("degree", [1, 3])
def test_kept_weights_are_the_numbers_of_a_plain_load(file, degree):
    weights = open_weights(file)
    placement = place(weights, degree)
    params, plain = weights.load(placement), weights.load(place(weights, degree, own=False))
    check_placed(params, placement)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(plain))
    check_equal_numbers(params, plain, weights.config)
    # Each device's MLP columns are the blocks of its part of the down projection.
    for layer in params["layers"]:
        down = host_numbers(layer["down"])
        assert layer["gate_up"].shape[1] == down.shape[1]


def test_the_native_format_keeps_them(file, converted):
    weights, checkpoint = open_weights(file), converted(file)
    native = open_weights(checkpoint.path)
    assert native.own_storage == checkpoint.storage == weights.own_storage
    assert checkpoint.num_bytes == sum(array.nbytes for array in stored_arrays(checkpoint))
    for degree in (1, 2):
        assert native.storage(plan_mesh(degree)) == weights.storage(plan_mesh(degree))
        for own in (True, False):
            placement = place(native, degree, own)
            params = native.load(placement)
            check_placed(params, placement)
            check_same(params, weights.load(place(weights, degree, own)))


@pytest.fixture
def in_chunks(q8_native, tmp_path, converted, monkeypatch):
    """The same checkpoint with its arrays in several chunks."""
    monkeypatch.setattr(native_write, "MIN_CHUNK_BYTES", 512)
    return converted(q8_native, "chunks")


def test_chunks_of_blocks_are_read_shard_by_shard(q8_native, in_chunks):
    chunks = sorted(f.name for f in (in_chunks.path / "arrays" / "layers.0.down" / "c" / "0").iterdir())
    assert chunks == ["0", "1", "2"]  # one per block of a row: along the columns that devices share
    whole, weights = open_weights(q8_native), open_weights(in_chunks.path)
    check_same(weights.load(place(weights, 2)), whole.load(place(whole, 2)))


def test_damaged_blocks_are_refused(in_chunks):
    chunk = in_chunks.path / "arrays" / "layers.0.down" / "c" / "0" / "2" / "0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    weights = open_weights(in_chunks.path)
    for own in (True, False):
        with pytest.raises(CheckpointError, match=r"layers\.0\.down: damaged or incomplete"):
            weights.load(place(weights, 2, own))


def test_plain_orbax_reads_the_bytes(q8_native):
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(q8_native / "arrays")
    np.testing.assert_array_equal(tree["layers"][1]["qkv"], read_leaf(open_native(q8_native), "layers.1.qkv"))


def test_own_storage(tmp_path):
    found = {}
    for name in ("q4_1", "f16", "medium", "motley"):
        cfg, kind = CASES[name]
        found[name] = open_weights(write_gguf(tmp_path / name, cfg, qtype=kind)).own_storage
    assert found["q4_1"] == Storage("q4_1")
    assert found["f16"] == Storage("float16")
    assert found["medium"] == Storage("q4_k", (
        ("embed", "q6_k"), ("layers.0.qkv", ("q4_k", "q4_k", "q6_k")), ("layers.0.down", "q6_k"),
    ))  # fmt: skip
    assert str(found["medium"]) == "q4_k and q6_k"
    layers = {f"layers.{i}" for i in range(2)}
    expected = {f"{layer}.qkv": ("q4_0", "float16", "bfloat16") for layer in layers}
    expected |= {f"{layer}.{name}": "float32" for layer in layers for name in ("gate_up", "down")}
    expected |= {f"{layer}.out": "q4_0" for layer in layers} | {"embed": "q4_0", "head": "float16"}
    assert {leaf: found["motley"].type_of(leaf) for leaf in expected} == expected


def test_blocks_that_cross_heads_are_kept_on_one_device_only(tmp_path):
    weights = open_weights(write_gguf(tmp_path / "m.gguf", WIDE, qtype=Kind.Q4_K))
    out = weights.load(place(weights, 1))["layers"][0]["out"]
    assert (out.format, out.shape) == ("q4_k", (256, 1, 1, 144))
    assert weights.storage(plan_mesh(2)).type_of("layers.0.out") == "float32"
    with pytest.raises(ValueError, match=r"q4_k blocks \(256, 1, 1, 144\) cannot be split over 2 devices"):
        Placement(WIDE, plan_mesh(2), np.dtype("float32"), storage=weights.own_storage).params()


def test_a_vocabulary_is_padded_with_zero_blocks(tmp_path):
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tiny_config(), qtype=Kind.Q4_1))
    placement = dataclasses.replace(place(weights, 3), vocab_rows=100)
    embed = weights.load(placement)["embed"]
    assert embed.shape == (102, 2, 20) and not embed.data[72:].any()


def test_blocks_that_are_not_there_are_refused(tmp_path, converted):
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), qtype=Kind.Q4_0)
    native = converted(path).path
    for place_of_weights in (path, native):
        weights = open_weights(place_of_weights)
        placement = Placement(weights.config, plan_mesh(1), np.dtype("float32"), storage=Storage("q8_0"))
        with pytest.raises(ConfigError, match=r"(kept|stored) as q4_0, it cannot be loaded as q8_0"):
            weights.load(placement)


def test_layers_of_blocks(tmp_path, converted):
    cfg, kind = CASES["medium"]
    path = write_gguf(tmp_path / "m.gguf", dataclasses.replace(cfg, num_layers=3), qtype=kind)
    checkpoint = converted(path, layers=1)
    own = open_weights(path).own_storage
    assert checkpoint.storage == restrict_storage(own, checkpoint.config)
    assert checkpoint.storage.type_of("layers.0.qkv") == ("q4_k", "q4_k", "q6_k")


def some_blocks(name):
    return Kind.Q6_K if "v_proj" in name else Kind.Q5_0 if "embed" in name else Kind.Q4_0


@pytest.mark.parametrize(("src", "quantize"), [("folder", "q4_0"), ("file", "q8_0"), ("native", "q4_0")])
def test_quantising(tmp_path, converted, src, quantize):
    cfg = dataclasses.replace(WIDE, family="qwen2", qkv_bias=True)
    if src == "folder":
        path = write_hf(tmp_path / "hf", cfg)
    else:
        path = write_gguf(tmp_path / "m.gguf", cfg, qtype=some_blocks)
    path = converted(path, "first").path if src == "native" else path
    checkpoint = converted(path, "quantised", quantize=quantize)
    top = () if quantize == "q8_0" else (("embed", "q8_0"), ("head", "q8_0"))
    assert checkpoint.storage == Storage(quantize, top)
    source, made = open_weights(path), open_weights(checkpoint.path)
    before, after = (by_name(w.load(place(w, 1, own=False))) for w in (source, made))
    held, kept = (by_name(w.load(place(w, 1))) for w in (source, made))
    for name, info in checkpoint.infos.items():
        if info.format is None:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
            continue
        stored = read_leaf(checkpoint, name)
        np.testing.assert_array_equal(kept[name].data, stored, err_msg=name)
        if isinstance(held[name], Blocks) and held[name].format == info.format:
            np.testing.assert_array_equal(stored, held[name].data, err_msg=name)
        else:
            rows = np.asarray(before[name]).reshape(-1, 32)
            expected = quantize_rows(rows, Kind[info.format.upper()])
            np.testing.assert_array_equal(stored.reshape(expected.shape), expected, err_msg=name)
            # Half a step, 1/127 or 1/8 of the largest value; a whole one on the side that four bits cut off.
            step = np.abs(rows).max(axis=1, keepdims=True) / (127 if info.format == "q8_0" else 8)
            assert (np.abs(np.asarray(after[name]).reshape(rows.shape) - rows) <= 1.02 * step).all(), name


def test_quantising_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_arrays", lambda *args: pytest.fail("work began"))
    path = write_gguf(tmp_path / "m.gguf", tiny_config())
    with pytest.raises(ConfigError, match=r"cannot be quantised to 'q80'; did you mean 'q8_0'\?"):
        convert(path, tmp_path / "new", quantize="q80")
    with pytest.raises(ConfigError, match="not rounded to 'q4_k', a K-quant: use q8_0 or q4_0"):
        convert(path, tmp_path / "new", quantize="q4_k")
    with pytest.raises(ConfigError, match="quantize 'q8_0' and dtype 'float32' exclude each other"):
        convert(path, tmp_path / "new", "float32", quantize="q8_0")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["arrays"]["embed"].update(format="q9_0"), "embed is .*q9_0"),
        (lambda m: m["arrays"]["embed"].update(format="q4_1"), "embed is .*q4_1"),
        (lambda m: m["arrays"]["embed"].pop("format"), "embed is "),
        (
            lambda m: m["arrays"]["layers.0.down"].update(format="q4_k"),
            "rows of 96 values are not a whole number of q4_k",
        ),
        (lambda m: m["arrays"].update({"layers.0.qkv.query": {}}), "layers.0.qkv.query is unexpected"),
        (lambda m: m.update(dtype="float32"), "dtype is 'float32', but most weights are q8_0"),
    ],
)
def test_wrong_manifests_of_blocks_are_refused(tmp_path, q8_native, change, message):
    folder = shutil.copytree(q8_native, tmp_path / "model", ignore=shutil.ignore_patterns("arrays"))
    manifest = json.loads((folder / "jaxspec.json").read_text())
    change(manifest)
    (folder / "jaxspec.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        open_native(folder)


XLA = Kernels("xla", "gpu")
PLANES = Kernels("pallas-triton", "gpu", implementations=(("linear", "triton"),), interpret=True)


COLUMNS = Kernels("xla", "tpu", implementations=(("linear", "mosaic_tpu"),), interpret=True)


def list_blocks(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Blocks))
    return [leaf for leaf in leaves if isinstance(leaf, Blocks)]


def run_pass(weights, placement):
    """Logits of five rows after a prompt of twenty."""
    cfg = weights.config

    def run(params, tokens):
        cache = init_cache(cfg, placement.local_kv_heads, 64, placement.dtype)
        cache = prefill(params, cfg, tokens[:20], jnp.int32(20), cache)
        hidden, _ = forward(params, cfg, tokens[20:], 20 + jnp.arange(5), cache, jnp.tril(jnp.ones((5, 5), bool)))
        return vocab_logits(params, cfg, hidden)

    out = placement.array((5, placement.padded_vocab), jnp.float32, None, TENSOR_AXIS)
    program = Program("run", run, placement.plan, [placement.params(), placement.array((25,), jnp.int32)], out)
    params, _ = OpenModels(weights).load(Models(placement))
    return np.asarray(program(params, np.arange(25, dtype=np.int32) % cfg.vocab_size))


@pytest.mark.parametrize(
    ("case", "gpu", "degree"),
    fast_part(
        [("medium", XLA, 2), ("motley", XLA, 1), ("q4_0", PLANES, 2), ("medium", PLANES, 1)],
        lambda case, gpu, degree: (case, gpu) != ("medium", PLANES),
    ),
)
def test_accelerators_keep_blocks(case, gpu, degree, tmp_path, monkeypatch):
    """A GGUF file's blocks stay packed on an accelerator: XLA makes numbers of a tile, a GPU kernel in registers."""
    cfg, kind = CASES[case]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", cfg, qtype=kind))
    monkeypatch.setattr(reference, "TILE_VALUES", 8192)
    plan = MeshPlan(tuple(jax.devices()[:degree]), gpu)
    placement, _ = OpenModels(weights).place(plan, plan, "auto")
    own = weights.storage(plan)
    for leaf in weight_leaves(cfg):
        in_blocks = all(part in FORMATS for part in parts_of(own.type_of(leaf)))
        assert placement.weights.type_of(leaf) == (own.type_of(leaf) if in_blocks else "float32"), leaf
    params, _ = OpenModels(weights).load(Models(placement))
    check_placed(params, placement)
    in_planes = {leaf.format.endswith("_planes") for leaf in list_blocks(params)}
    assert in_planes == {gpu.reads_planes}
    assert sum(leaf.nbytes for leaf in list_blocks(params)) <= 1.03 * sum(
        leaf.nbytes for leaf in list_blocks(weights.load(placement))
    )
    kept, plain = run_pass(weights, placement), run_pass(weights, place(weights, degree, own=False))
    # Rows and weights are rounded to bfloat16.
    assert np.abs(plain).max() > 1e-3
    np.testing.assert_allclose(kept, plain, atol=0.03 * np.abs(plain).max())
    as_numbers, _ = OpenModels(weights).place(plan, plan, "float32")
    assert as_numbers.weights == Storage("float32")


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "degree"), [("q4_0", 1), ("q8_0", 2)])
def test_tpus_keep_blocks_of_integers(case, degree, tmp_path):
    """In columns, all but embedding and head; the logits are those of the numbers, rounded to bfloat16."""
    cfg, kind = CASES[case]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", cfg, qtype=kind))
    plan = MeshPlan(tuple(jax.devices()[:degree]), COLUMNS)
    placement, _ = OpenModels(weights).place(plan, plan, "auto")
    params, _ = OpenModels(weights).load(Models(placement))
    blocks = list_blocks(params)
    assert len(blocks) == 4 * cfg.num_layers and {leaf.format for leaf in blocks} == {columns_name(case)}
    for layer in params["layers"]:
        K, n, H = layer["qkv"].shape[:3]
        assert (K % cfg.num_kv_heads, n, H) == (0, cfg.group + 2, cfg.head_dim)
        assert layer["gate_up"].shape[0] == 2 and layer["down"].shape[0] == layer["out"].shape[0] == cfg.embed_dim
    kept, plain = run_pass(weights, placement), run_pass(weights, place(weights, degree, own=False))
    np.testing.assert_allclose(kept, plain, atol=0.03 * np.abs(plain).max())


def list_outs(params):
    return [layer["out"] for layer in params["layers"]]


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow), 8])
def test_tpus_have_output_projections_as_matrices(degree, tmp_path):
    """The same numbers on each device, where devices share heads too, and for layers that are streamed."""
    cfg, kind = CASES["q4_0"]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", cfg, qtype=kind))
    plan, plain = MeshPlan(tuple(jax.devices()[:degree]), COLUMNS), place(weights, degree, own=False)
    placement, _ = OpenModels(weights).place(plan, plan, "float32")
    assert [out.shape for out in list_outs(placement.own_params())] == [out.shape for out in list_outs(plain.params())]
    (params, _), loaded = OpenModels(weights).load(Models(placement)), weights.load(plain)
    for index, (matrix, heads) in enumerate(zip(list_outs(params), list_outs(loaded), strict=True)):
        assert matrix.ndim == 2 < heads.ndim
        (leaf,) = [each for each in layer_layouts(placement)[index].weights.leaves if each.name.endswith(".out")]
        buffers = [np.zeros(leaf.shard_shape, np.float32) for _ in leaf.shards]
        leaf.write(collect_declared(heads, leaf.info), buffers)
        for one, other, buffer in zip(matrix.addressable_shards, heads.addressable_shards, buffers, strict=True):
            assert one.device == other.device
            np.testing.assert_array_equal(one.data, other.data.reshape(cfg.embed_dim, -1))
            np.testing.assert_array_equal(one.data, buffer)
    want = run_pass(weights, plain)
    np.testing.assert_allclose(run_pass(weights, placement), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("case", "kernels"), [("q4_1", COLUMNS), ("q4_0", Kernels("xla", "tpu"))], ids=["format", "kernel"]
)
def test_other_blocks_are_refused_on_tpus(case, kernels, tmp_path):
    cfg, kind = CASES[case]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", cfg, qtype=kind))
    plan = MeshPlan((jax.devices()[0],), kernels)
    with pytest.raises(ConfigError, match=rf"blocks \({case}\) have no kernels for TPUs: .*--quantize q8_0"):
        OpenModels(weights).place(plan, plan, "auto")
    OpenModels(weights).place(plan, plan, "bfloat16")


@pytest.mark.parametrize(("case", "kernels"), [("q6_k", PLANES), ("q8_0", COLUMNS)], ids=["planes", "columns"])
def test_streamed_layers_are_laid_out_alike(case, kernels, tmp_path):
    """Offload packs on the host what else a device packs."""
    cfg, kind = CASES[case]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", cfg, qtype=kind))
    plan = MeshPlan((jax.devices()[0],), kernels)
    placement, _ = OpenModels(weights).place(plan, plan, "auto")
    loaded, (packed, _) = weights.load(placement), OpenModels(weights).load(Models(placement))
    for name in ("qkv", "out", "gate_up", "down"):
        (leaf,) = [leaf for leaf in layer_layouts(placement)[0].weights.leaves if leaf.name == f"layers.0.{name}"]
        buffer = np.zeros(leaf.shard_shape, np.uint8)
        leaf.write(np.asarray(loaded["layers"][0][name].data), [buffer])
        assert leaf.packed in ("q6_k_planes", "int8_g32_columns") and packed["layers"][0][name].format == leaf.packed
        np.testing.assert_array_equal(buffer, packed["layers"][0][name].data, err_msg=name)


@pytest.mark.parametrize(
    ("case", "degree"), [("q8_0", 2), ("q4_1", 1), ("medium", 1), ("medium", 2), ("motley", 1), ("bf16", 2)]
)
def test_forward_through_what_is_kept(case, degree, tmp_path):
    """Logits from kept weights are those of the numbers they stand for: bit for bit through native kernels.

    On several devices each adds up its own columns, whole blocks of them in one case, and rounding differs.
    """
    cfg, kind = CASES[case]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", cfg, qtype=kind))
    placement = place(weights, degree)
    kept, plain = run_pass(weights, placement), run_pass(weights, place(weights, degree, own=False))
    assert np.isfinite(plain).all() and plain.std() > 1e-3
    if not placement.plan.kernels.native:
        # XLA rounds activations to half precision before it multiplies half-precision weights.
        np.testing.assert_allclose(kept, plain, atol=0.02 * np.abs(plain).max())
    elif degree > 1:
        np.testing.assert_allclose(kept, plain, atol=2e-6 * np.abs(plain).max())
    else:
        np.testing.assert_array_equal(kept, plain)
