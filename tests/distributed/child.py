"""One of several processes: loads models, decodes with methods, and compares what all processes did.

Its argument is JSON: `processes`, `process`, `port`, `devices` of each, `loads`: a list of `LLM` arguments with
`methods`, names with settings, that decode in turn. Process 0 prints the tokens of each, as JSON.
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    given = json.loads(sys.argv[1])
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(given["devices"])}
    import jax

    import jaxspec
    from jaxspec.engine import Session
    from jaxspec.llm import internals
    from jaxspec.methods.registry import make_method
    from jaxspec.runtime import hosts, sharding, transfer
    from jaxspec.runtime.program import Program

    log: list[str] = []
    call, step, send = Program.__call__, Session.step, transfer._send

    def logged_call(self, *args):
        log.append(f"{self.name} on {[device.id for device in self.plan.devices]}")
        return call(self, *args)

    def logged_send(array, devices, sharding):
        log.append(f"send to {[device.id for device in devices]}")
        return send(array, devices, sharding)

    def logged_step(self):
        if given.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        output = step(self)
        log.append(f"read {output.tokens}")
        return output

    Program.__call__, Session.step, transfer._send = logged_call, logged_step, logged_send  # pyright: ignore[reportAttributeAccessIssue]
    where = {"coordinator": f"127.0.0.1:{given['port']}", "num_processes": given["processes"]}
    where |= {"process_id": given["process"], "fault_timeout": given.get("fault_timeout", 60)}
    for load in given["loads"]:
        methods, plan = load.pop("methods"), load.pop("draft_process", None)
        if plan is not None:
            # Where the draft lies may differ from load to load here; a user gives it once.
            from jaxspec.runtime import distributed

            distributed.initialize(where)
            distributed._settings = distributed.Distributed(**where, draft_process=plan)
        start, read = time.monotonic(), sharding.bytes_read()
        load["method"] = first = make_method(*load["method"])
        llm = jaxspec.LLM(**load, distributed=None if plan is not None else where)
        placements = [placement for placement in internals(llm).models if placement is not None]
        expected = sum(
            sharding.share_of(shapes) * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
            for shapes in (placement.own_params() for placement in placements)
        )
        shares = hosts.gather("bytes read", (sharding.bytes_read() - read) / expected)
        print(f"read over share: {shares}", file=sys.stderr)
        if given["process"]:
            llm.follow()
        else:
            print(f"{internals(llm).device_plan}; loaded after {time.monotonic() - start:.1f} s", file=sys.stderr)
            for name, settings in methods:
                method = make_method(name, settings)
                chosen = llm if method == first else llm.with_method(method)
                results = [
                    chosen.generate(given["prompt"], jaxspec.SamplingParams(**sampling)).token_ids
                    for sampling in given["samplings"]
                ]
                print(json.dumps([name, results]), flush=True)
                print(f"{name} after {time.monotonic() - start:.1f} s", file=sys.stderr)
            hosts.end_commands()
        if (stream := internals(llm).layer_stream) is not None:
            counts = stream.counts
            streamed = hosts.gather("streamed", [stream.nbytes, counts.passes, counts.bytes])
            print(f"streamed: {streamed}", file=sys.stderr)
        if plan is not None:
            distributed._settings = distributed.Distributed(**where)
        logs = hosts.gather("log", log)
        for process, other in enumerate(logs):
            for number, (first, second) in enumerate(zip(logs[0], other, strict=False)):
                if first != second:
                    sys.exit(f"step {number}: process 0 did {first!r}, process {process} {second!r}")
            if len(logs[0]) != len(other):
                sys.exit(f"process 0 did {len(logs[0])} steps, process {process} {len(other)}")
        print(f"{len(log)} steps alike", file=sys.stderr)
        log.clear()


if __name__ == "__main__":
    main()
