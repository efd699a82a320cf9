"""Counts of what XLA's compilers for GPUs and TPUs made of a program, read from their texts; see compile_for.py."""

import collections
import math
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = {"bf16": 2, "f16": 2, "s8": 1, "pred": 1}  # of a number in bytes, where it is not 4
# Between a TPU and its host.
TRANSFERS = ("send", "recv", "infeed", "outfeed")
# Instructions that launch nothing.
FREE = frozenset((
    "parameter", "bitcast", "get-tuple-element", "tuple", "constant", "while", "conditional", "call", "after-all",
    "opt-barrier", "async-done", "copy-done", "all-reduce-done", "all-gather-done",
))  # fmt: skip


def read_memory(compiled: Any) -> dict[str, int]:
    """Bytes on a device by the compiler's account."""
    found = compiled.memory_analysis()
    return {"memory": found.temp_size_in_bytes, "arguments": found.argument_size_in_bytes}


def count_text(text: str, nested: bool = False) -> dict[str, Any]:
    """Counts of a program's compiled text; see the module. `nested` counts bodies of loops and branches once, too."""
    bodies = split_computations(text)
    counted = list_nested(bodies) if nested else ["ENTRY"]
    entry = [found for body in counted for line in bodies[body] if (found := read_instruction(line))]
    loops, on_data = [], []
    for line in (line for lines in bodies.values() for line in lines):
        found = read_instruction(line)
        if found and found[0] in ("while", "conditional"):
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            named = re.search(r'op_name="([^"]*)"', line)
            where = named[1].partition("/")[2] if named else found[1]
            (loops if turns else on_data).append(where)
    kinds = collections.Counter(kind for kind, _, _ in entry if kind not in FREE)
    caches = {shape for shape in re.findall(r"bf16\[\d+,\d{3,},\d+\]", text)}
    crossed = [shape for kind, _, shape in entry if kind.removesuffix("-start") in COLLECTIVES]
    crossing = sum(list_arrays(shape)[0][0] for shape in crossed)
    transfers = [name for lines in bodies.values() for kind, name, _ in filter(None, map(read_instruction, lines))
                 if kind in TRANSFERS]  # fmt: skip
    # S(1) is memory beside a TPU's core: what is read there again and again is copied there once.
    copies = sum(
        kind == "copy" and "S(1)" not in shape and any(shape.startswith(cache) for cache in caches)
        for kind, _, shape in entry
    )
    written = [array for kind, _, shape in entry if not kind.endswith("-start") for array in list_arrays(shape)
               if "S(1)" not in array[1] and array[1].partition("{")[0] not in caches]  # fmt: skip
    return {
        "on_data": on_data, "loops": loops, "products": text.count(" convolution("),
        "kernels": sum(kinds.values()), "kinds": dict(kinds), "copies": copies,
        "collectives": len(crossed), "crossing": crossing, "transfers": transfers,
        "layer": list_layer(bodies["ENTRY"]), "largest": max(written, default=(0, "")),
    }  # fmt: skip


def list_arrays(shape: str) -> list[tuple[int, str]]:
    """Bytes and text of each array in an instruction's shape."""
    return [
        (SIZES.get(found[1], 4) * math.prod(map(int, filter(None, found[2].split(",")))), found[0])
        for found in re.finditer(r"(\w+)\[([\d,]*)\](?:\{[^}]*\})?", shape)
    ]


def list_nested(bodies: dict[str, list[str]]) -> list[str]:
    """Names of the computations that run: the entry, and those of its loops and branches; no fused ones."""
    found, waiting = [], ["ENTRY"]
    while waiting:
        found.append(waiting.pop())
        for line in bodies[found[-1]]:
            if " while(" in line or " conditional(" in line or " call(" in line:
                names = re.findall(r"(?:body|computation|computations|to_apply)=({.*?}|%?[\w.\-]+)", line)
                inside = [name for each in names for name in re.findall(r"[\w.\-]+", each)]
                waiting += [name for name in inside if name in bodies and name not in (*found, *waiting)]
    return found


def list_layer(entry: Sequence[str]) -> list[str]:
    """Launches from the last attention but one to the last: instruction, shape, and what it computes."""
    launches, starts = [], []
    for line in entry:
        kind, name, shape = read_instruction(line) or ("parameter", "", "")
        if kind in FREE:
            continue
        named = re.search(r'op_name="([^"]*)"', line)
        where = "/".join(part for part in named[1].split("/") if "(" not in part) if named else kind
        if {"tree_attention", "jaxspec_exact_attention"} & {*where.split("/")[-2:]}:
            starts.append(len(launches))
        launches.append(f"{name} {shape}: {where}")
    return launches[starts[-2] : starts[-1]] if len(starts) > 1 else []


def read_thunks(text: str) -> tuple[list[str], int]:
    """Kinds of what the host launches, in order, and how many loops and branches lie outside of CUDA graphs."""
    launched, free, above = [], 0, []
    for line in text.splitlines():
        found = re.match(r"( *)\d+: k(\w+)", line)
        if not found:
            continue
        depth, kind = len(found[1]), found[2]
        above = [(indent, other) for indent, other in above if indent < depth]
        if not depth:
            launched.append(kind)
        if kind in ("While", "Conditional") and all(other != "CommandBuffer" for _, other in above):
            free += 1
        above.append((depth, kind))
    return launched, free


def split_computations(text: str) -> dict[str, list[str]]:
    """Lines of each computation of a module, the entry's as "ENTRY"."""
    found, current = {}, None
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line.strip())
    return found


def read_instruction(line: str) -> tuple[str, str, str] | None:
    """Kind, name and shape of an instruction; a call's kind is what it calls."""
    # Tuples of more than five have comments: "/*index=5*/".
    found = re.match(r"(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line)
    if not found:
        return None
    name, shape, kind = found.groups()
    if kind == "custom-call" and (called := re.search(r'custom_call_target="([^"]+)"', line)):
        kind = called[1]
    return kind, name, shape


def assemble(file: Path) -> list[dict[str, Any]]:
    """Name, registers, spilled bytes and shared memory of each kernel in a PTX file, by ptxas."""
    text = file.read_text(encoding="utf-8")
    if not text:
        return []  # a module whose kernels all have files of their own
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    assert target is not None
    said = subprocess.run(
        ["ptxas", "-v", f"-arch={target[1]}", "-o", os.devnull, str(file)], check=True, capture_output=True, text=True
    ).stderr
    kernels = []
    for part in re.split(r"Compiling entry function ", said)[1:]:
        name = re.match(r"'([^']+)'", part)
        spilled = re.search(r"(\d+) bytes spill stores", part)
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        kernels.append({
            "name": name[1] if name else "", "spills": int(spilled[1]) if spilled else 0,
            "registers": int(used[1]) if used else 0, "shared": int(shared[1]) if shared else 0,
        })  # fmt: skip
    return kernels
