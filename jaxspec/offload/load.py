"""Loading of a pair whose target is streamed: what stays is placed, the layers that pass by get a store."""

import functools

import jax

from jaxspec.checkpoint import shared_weights
from jaxspec.checkpoint.load import Weights, place_leaf
from jaxspec.checkpoint.packing import pack_trees
from jaxspec.checkpoint.pair import DamagedDraftError
from jaxspec.config import Offload
from jaxspec.errors import CheckpointError
from jaxspec.models.params import Params, declare_params, is_info, leaf_name
from jaxspec.offload.layout import layer_layouts, slot_layouts
from jaxspec.offload.reader import DirectReader
from jaxspec.offload.stores import DiskStore, HostStore, WeightStore, read_tree
from jaxspec.offload.stream import LayerStream
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.sharding import ReadLeaf


def load_streamed_pair(
    weights: Weights, draft_weights: Weights | None, target: Placement, draft: Placement | None, offload: Offload
) -> tuple[Params, Params | None]:
    """Read both models; `params["layers"]` of the target is a `LayerStream` over a store in memory or on disk.

    Raises:
      DamagedDraftError: the draft cannot be read.
      CheckpointError: the target cannot be read, or its format cannot be streamed.
    """
    if weights.direct is None:
        raise CheckpointError(f"{weights.path}: cannot be read piece by piece, which offload {offload!r} needs")
    reader = DirectReader()
    try:
        # One of several processes needs a part of each array, which lies in many pieces of a file.
        read = weights.direct(reader) if jax.process_count() == 1 else weights.read
        params = _read_beside(read, target)
        draft_params = None
        if draft is not None and draft_weights is not None:
            try:
                own = draft_weights.load(draft)
            except CheckpointError as error:
                raise DamagedDraftError(str(error)) from error
            read_target = shared_weights.target_reader(weights, target, draft)
            draft_params = own | shared_weights.share_embedding(draft, params, read_target)
        shapes = [{name: leaf for name, leaf in target.params().items() if name != "layers"}]
        trees = [params]
        if draft is not None and draft_params is not None:
            trees, shapes = [*trees, draft_params], [*shapes, draft.params()]
        packed = pack_trees(trees, shapes)
        params, draft_params = packed[0], packed[1] if draft is not None else None
        layouts, streamed = layer_layouts(target), target.streamed
        path = weights.path
        small = [read_tree(read, layout.small, path) for layout in layouts]
        resident = {i: read_tree(read, layout.weights, path) for i, layout in enumerate(layouts) if i not in streamed}
        passing = {i: layouts[i].passing for i in streamed}
        experts = {i: one for i in streamed if (one := layouts[i].experts) is not None}
        store: WeightStore = DiskStore(passing, reader, read, path, experts)
        if offload == "host":
            store = HostStore(store)
            reader.close()
    except BaseException:
        reader.close()
        raise
    stream = LayerStream(store, small, resident, slots=slot_layouts(target), kept=target.kept_experts)
    return params | {"layers": stream}, draft_params


def _read_beside(read: ReadLeaf, target: Placement) -> Params:
    """Read the parameters outside the layers, before anything is packed."""
    declared, shapes = (
        {name: leaf for name, leaf in tree.items() if name != "layers"}
        for tree in (declare_params(target.cfg, target.weights), target.own_params())
    )
    infos, _ = jax.tree.flatten_with_path(declared, is_leaf=is_info)
    # The memory that was read into may be the array's own from here on.
    place = functools.partial(place_leaf, read)
    return jax.tree.unflatten(
        jax.tree.structure(shapes),
        [
            place(leaf_name(path), info, shape)
            for (path, info), shape in zip(infos, jax.tree.leaves(shapes), strict=True)
        ],
    )
