"""One of several processes that load checkpoints and compare what each holds with the whole; nothing is compiled.

Its argument is JSON: `processes`, `process`, `port`, `devices` of each, and `loads`: path, whether weights stay in
blocks, and whether a mixture's experts lie whole on the devices. Process 0 prints the share of its bytes that each
process has read, relative to its share of the weights, for each load.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    given = json.loads(sys.argv[1])
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(given["devices"])}
    import jax
    import numpy as np

    from jaxspec.checkpoint.load import open_weights
    from jaxspec.models.params import declare_leaves, declare_params, leaf_name
    from jaxspec.models.quantization import as_storage
    from jaxspec.runtime import distributed, hosts, sharding
    from jaxspec.runtime.mesh import MeshPlan
    from jaxspec.runtime.placement import Placement
    from jaxspec.runtime.sharding import place_declared, placed_shapes
    from pallas_kernels.selection import choose

    where = {"coordinator": f"127.0.0.1:{given['port']}", "num_processes": given["processes"]}
    distributed.initialize(where | {"process_id": given["process"]})
    for path, blocks, expert_parallel in given["loads"]:
        weights = open_weights(Path(path))
        plan = MeshPlan(tuple(jax.devices()), choose("xla", "cpu", 1, jax.local_devices()[0]), expert_parallel)
        storage = weights.storage(plan) if blocks else as_storage(np.float32)
        before = sharding.bytes_read()
        params = weights.load(Placement(weights.config, plan, np.dtype("float32"), storage=storage))
        read = sharding.bytes_read() - before
        targets = placed_shapes(declare_params(weights.config, storage), plan)
        infos = declare_leaves(weights.config, storage)
        assert weights.file_bytes is not None
        whole = sum(weights.file_bytes(name, info) for name, info in infos.items())
        for (at, target), found in zip(jax.tree.leaves_with_path(targets), jax.tree.leaves(params), strict=True):
            name = leaf_name(at)
            wanted = place_declared(weights.read(name, infos[name]), infos[name], target)
            assert found.sharding == wanted.sharding and found.dtype == wanted.dtype, name
            for ours, cut in zip(found.addressable_shards, wanted.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(cut.data), err_msg=f"{path}: {name}")
        own = sharding.share_of(targets) * whole
        told = hosts.gather("read", (read / own, own))
        if not given["process"]:
            print(json.dumps(["read", path, blocks, expert_parallel, told]), flush=True)


if __name__ == "__main__":
    main()
