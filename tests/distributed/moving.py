"""One of several processes that send arrays from mesh to mesh; nothing is compiled.

Its argument is JSON: `processes`, `process`, `port`. A mesh is one process's device, or those of all others. Every
process compares what it receives with what was sent, and prints how many arrays it has received.
"""

import itertools
import json
import os
import sys


def main() -> None:
    given = json.loads(sys.argv[1])
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    import jax
    import numpy as np

    from jaxspec.runtime import distributed, transfer
    from jaxspec.runtime.mesh import MeshPlan
    from pallas_kernels.selection import choose

    where = {"coordinator": f"127.0.0.1:{given['port']}", "num_processes": given["processes"]}
    distributed.initialize(where | {"process_id": given["process"]})
    devices, kernels = jax.devices(), choose("xla", "cpu", 1, jax.local_devices()[0])
    one = [MeshPlan((device,), kernels) for device in devices]
    others = [MeshPlan((*devices[:i], *devices[i + 1 :]), kernels) for i in range(len(devices))]
    ways = [*itertools.permutations(one, 2), *zip(one, others, strict=True), *zip(others, one, strict=True)]
    received = 0
    for number, (source, end) in enumerate(ways):
        sent = np.arange(5) + number
        arrived = transfer.transfer(transfer.place(sent, transfer.replicated(source)), end)
        for read in (arrived, transfer.everywhere(arrived)):
            for shard in read.addressable_shards:
                np.testing.assert_array_equal(shard.data, sent)
                received += 1
    print(received)


if __name__ == "__main__":
    main()
