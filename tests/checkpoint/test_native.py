import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from native_models import EOS_IDS, LLAMA, MISTRAL, QWEN2, QWEN3, write_native, write_tokenizer

from jaxspec.checkpoint.native import write as native_write
from jaxspec.checkpoint.native.checkpoint import read_leaf, restore_native
from jaxspec.checkpoint.native.manifest import open_native, verify_native
from jaxspec.errors import CheckpointError
from jaxspec.models.heads import arrange_heads
from jaxspec.models.params import declare_leaves, declare_params, leaf_name
from jaxspec.models.quantization import as_storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.sharding import placed_shapes, split_layout

BF16 = jnp.dtype(jnp.bfloat16)


def named(tree):
    return {leaf_name(path): leaf for path, leaf in jax.tree.flatten_with_path(tree)[0]}


def pad(array, shape):
    return np.pad(array, [(0, n - have) for n, have in zip(shape, array.shape, strict=True)])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A checkpoint of several chunks per array, to copy and damage."""
    folder = tmp_path_factory.mktemp("native") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_write, "MIN_CHUNK_BYTES", 512)
        arrays = write_native(folder, LLAMA)
    assert len([f for f in (folder / "arrays" / "layers.1.qkv").rglob("*") if f.is_file()]) > 2
    return folder, arrays


@pytest.fixture
def copy(pristine, tmp_path):
    return shutil.copytree(pristine[0], tmp_path / "model")


@pytest.mark.parametrize(
    ("cfg", "dtype"),
    [(LLAMA, np.float32), (LLAMA, BF16), (MISTRAL, BF16), (QWEN2, np.float32), (QWEN3, BF16)],
    ids=lambda value: getattr(value, "family", None),
)
def test_what_is_written_is_read(tmp_path, cfg, dtype):
    arrays = write_native(tmp_path / "model", cfg, dtype)
    checkpoint = open_native(tmp_path / "model")
    assert checkpoint.config == cfg
    assert checkpoint.eos_ids == EOS_IDS
    assert checkpoint.storage == as_storage(dtype)
    assert checkpoint.num_bytes == sum(array.nbytes for array in arrays.values())
    restored = named(restore_native(checkpoint, plan_mesh(1)))
    assert list(restored) == list(arrays)
    for name, array in arrays.items():
        assert restored[name].dtype == array.dtype
        np.testing.assert_array_equal(restored[name], array, err_msg=name)
        np.testing.assert_array_equal(read_leaf(checkpoint, name), array, err_msg=name)


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_restored_shards_are_padded_with_zeros(pristine, degree):
    folder, arrays = pristine
    plan = plan_mesh(degree)
    restored = named(restore_native(open_native(folder), plan))
    infos = declare_leaves(LLAMA, jnp.float32)
    for name, target in named(placed_shapes(declare_params(LLAMA, jnp.float32), plan)).items():
        leaf, info = restored[name], infos[name]
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (target.shape, target.dtype, target.sharding), name
        expected = arrays[name]
        if (layout := split_layout(info, degree)) is not None:
            axis = info.axes.index("kv_heads")
            expected = arrange_heads(expected, layout, axis, info.axes[axis + 1])
        expected = pad(expected, target.shape)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index], err_msg=name)


def test_restored_on_devices_other_than_the_first(pristine):
    plan = plan_mesh(2, offset=5)
    restored = restore_native(open_native(pristine[0]), plan)
    assert {shard.device for shard in restored["embed"].addressable_shards} == set(plan.devices)


def test_cast_on_restore_keeps_norms(pristine):
    folder, arrays = pristine
    restored = named(restore_native(open_native(folder), plan_mesh(2), jnp.bfloat16))
    assert restored["layers.0.attn_norm"].dtype == jnp.float32
    down = restored["layers.0.down"]
    assert down.dtype == BF16
    np.testing.assert_array_equal(down, pad(arrays["layers.0.down"].astype(BF16), down.shape))


def test_plain_orbax_reads_the_arrays(pristine):
    folder, arrays = pristine
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder / "arrays")
    assert sorted(named(tree)) == sorted(arrays)
    np.testing.assert_array_equal(tree["layers"][1]["qkv"], arrays["layers.1.qkv"])


def flip_byte(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-9])


def edit_json(change):
    def edit(file):
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return edit


LAST_CHUNK = "layers.1.qkv/c/2/0/0/0"
ZARR = "layers.1.qkv/zarr.json"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        pytest.param(LAST_CHUNK, flip_byte, id="flipped byte"),
        pytest.param(LAST_CHUNK, truncate, id="truncated chunk"),
        pytest.param(LAST_CHUNK, lambda f: f.write_bytes(b""), id="empty chunk"),
        pytest.param(LAST_CHUNK, lambda f: f.unlink(), id="missing chunk"),
        pytest.param(ZARR, lambda f: f.unlink(), id="missing array metadata"),
        pytest.param(ZARR, truncate, id="truncated array metadata"),
        pytest.param(ZARR, edit_json(lambda z: z.update(shape=[3, 4, 4, 8])), id="other shape"),
        pytest.param(ZARR, edit_json(lambda z: z.update(shape=[2**60] * 4)), id="absurd shape"),
        pytest.param(ZARR, edit_json(lambda z: z.update(data_type="int32")), id="other dtype"),
        pytest.param(ZARR, edit_json(lambda z: z["codecs"].pop()), id="checksums switched off"),
        pytest.param(ZARR, edit_json(lambda z: z.pop("chunk_grid")), id="no chunks"),
        pytest.param(
            ZARR,
            edit_json(lambda z: z["chunk_grid"]["configuration"].update(chunk_shape=[2**60, 4, 4, 16])),
            id="absurd chunks",
        ),
        pytest.param("layers.1.qkv", shutil.rmtree, id="missing array"),
        pytest.param("_METADATA", lambda f: f.unlink(), id="missing tree"),
        pytest.param("_METADATA", truncate, id="truncated tree"),
        pytest.param("_METADATA", edit_json(lambda m: m["tree_metadata"].popitem()), id="incomplete tree"),
        pytest.param("_METADATA", edit_json(lambda m: m.update(tree_metadata={})), id="empty tree"),
        pytest.param("_METADATA", edit_json(lambda m: m.update(use_zarr3=False)), id="other storage"),
        pytest.param("", shutil.rmtree, id="no arrays"),
    ],
)
def test_damaged_arrays_are_refused(copy, file, damage):
    damage(copy / "arrays" / file)
    with pytest.raises(CheckpointError, match=str(copy)):
        restore_native(open_native(copy), plan_mesh(1))


@pytest.mark.parametrize("damage", [flip_byte, lambda f: f.unlink()])
def test_read_leaf_refuses_damage(copy, damage):
    damage(copy / "arrays" / LAST_CHUNK)
    with pytest.raises(CheckpointError, match=r"layers\.1\.qkv: damaged or incomplete"):
        read_leaf(open_native(copy), "layers.1.qkv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("format"), "format is None"),
        (lambda m: m.update(format="orbax"), "format is 'orbax'"),
        (lambda m: m.update(version=3), "format version 3 is not supported, this jaxspec reads 1 and 2"),
        (lambda m: m.update(version=1), "unknown keys: .'files', 'checksum'"),
        (lambda m: m.pop("files"), "missing keys: .'files'"),
        (lambda m: m.update(files=[]), "files must be an object"),
        (lambda m: m["files"].update({"../other": {"bytes": 0, "sha256": ""}}), "'../other', which is no plain path"),
        (lambda m: m["files"].update(x=3), "must give bytes and sha256 of 'x'"),
        (lambda m: m["files"].update(x={"bytes": 1, "sha256": ""}), "checksum is not that of its content"),
        (lambda m: m["model"]["rope"].update(theta=20000.0), "checksum is not that of its content"),
        (lambda m: m.update(version=True), "format version True"),
        (lambda m: m.pop("eos_ids"), "missing keys: .'eos_ids'"),
        (lambda m: m.update(extra=1), "unknown keys: .'extra'"),
        (lambda m: m.update(dtype="int8"), "dtype is 'int8'"),
        (lambda m: m.update(dtype=["float32"]), "dtype is .'float32'"),
        (lambda m: m.update(eos_ids=[50]), "token ids below 50"),
        (lambda m: m.update(eos_ids=[True]), "eos_ids"),
        (lambda m: m.update(eos_ids=2), "eos_ids"),
        (lambda m: m.update(num_bytes=1), "num_bytes is 1, the arrays have"),
        (lambda m: m.update(model=[]), "model: must be a table"),
        (lambda m: m["model"].pop("mlp_dim"), "model: missing mlp_dim"),
        (lambda m: m["model"].update(mlp_dims=3), "unknown key 'mlp_dims'; did you mean 'mlp_dim'"),
        (lambda m: m["model"].update(mlp_dim=24.0), "mlp_dim must be int"),
        (lambda m: m["model"].update(tied=1), "tied must be bool"),
        (lambda m: m["model"].update(norm_eps=float("nan")), "norm_eps must be float"),
        (lambda m: m["model"].update(family="gpt2"), "model family .gpt2. is not supported; supported: llama, "),
        (lambda m: m["model"].update(num_kv_heads=4), "num_heads 6 is not a multiple of num_kv_heads 4"),
        (lambda m: m["model"].update(num_layers=2**31 - 1), "2147483647 layers, but only 15 arrays"),
        (lambda m: m["model"].update(mlp_dim=25), "arrays do not match the model"),
        (lambda m: m["model"].update(tied=True), "head is unexpected"),
        (lambda m: m["model"]["rope"].update(scaling="mrope"), "rope: scaling must be one of"),
        (lambda m: m["arrays"].pop("embed"), "embed is missing"),
        (lambda m: m["arrays"]["embed"].update(shape=[50, 17]), "embed is .*17"),
        (lambda m: m["arrays"].update({"../../etc": {}}), "etc is unexpected"),
        (lambda m: m.update(arrays=[]), "arrays must be an object"),
    ],
)
def test_wrong_manifests_are_refused(copy, change, message):
    edit_json(change)(copy / "jaxspec.json")
    with pytest.raises(CheckpointError, match=message):
        open_native(copy)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1, "format": 2}'])
def test_manifests_that_are_no_json_object_are_refused(copy, content):
    (copy / "jaxspec.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"jaxspec\.json"):
        open_native(copy)


def test_a_folder_without_manifest_is_no_checkpoint(copy):
    (copy / "jaxspec.json").unlink()
    with pytest.raises(CheckpointError, match=r"jaxspec\.json is missing"):
        open_native(copy)


def test_work_in_progress_is_no_checkpoint_even_when_complete(copy):
    left = copy.rename(copy.with_name(".model.partial-123"))
    with pytest.raises(CheckpointError, match="interrupted conversion"):
        open_native(left)


def change_word(file):
    file.write_bytes(file.read_bytes().replace(b"w3", b"w?"))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("tokenizer_config.json", lambda f: f.unlink(), "is missing, and jaxspec.json lists it"),
        ("tokenizer.json", change_word, "has SHA-256"),
        ("tokenizer.json", truncate, "bytes, and jaxspec.json says"),
        ("chat_template.jinja", lambda f: f.write_text("x"), "was added to the checkpoint"),
    ],
)
def test_a_tokenizer_that_changed_is_no_checkpoint(copy, file, damage, message):
    """A chat template that is gone changes the text, and nothing else would say so."""
    write_tokenizer(copy, LLAMA.vocab_size)
    open_native(copy)
    damage(copy / file)
    with pytest.raises(CheckpointError, match=f"{file}.*{message}"):
        open_native(copy)


def test_verifying_reads_every_file(copy):
    write_tokenizer(copy, LLAMA.vocab_size)
    (copy / "notes.txt").write_text("a file that nothing reads")
    checkpoint = verify_native(copy)
    assert set(checkpoint.files) == {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()} - {
        "jaxspec.json",
        "notes.txt",
    }
    success = copy / "arrays" / "commit_success.txt"
    success.write_text("other")
    with pytest.raises(CheckpointError, match="commit_success.txt"):
        verify_native(copy)


def test_checkpoints_of_version_1_load_and_cannot_be_verified(copy):
    edit_json(lambda m: (m.pop("files"), m.pop("checksum"), m.update(version=1)))(copy / "jaxspec.json")
    assert open_native(copy).files is None
    with pytest.raises(CheckpointError, match="version 1, which lists no checksums"):
        verify_native(copy)
