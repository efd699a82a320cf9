"""The default model through every method, by `jaxspec.bench`: wall clock, with everything that users wait for."""

from collections.abc import Iterator
from typing import Any

from jaxspec.bench.columns import default_methods, loading_method, make_columns
from jaxspec.bench.prompts import load_prompts, select_prompts
from jaxspec.bench.report import make_report
from jaxspec.bench.run import BASELINE, measure
from jaxspec.config import SamplingParams
from jaxspec.llm import LLM
from jaxspec.loading import has_draft
from kernel_bench.device import name_device
from kernel_bench.parts import describe_error

PROMPTS, TOKENS, REPEATS = 4, 96, 1
# Kept of a report: the samples hold every token.
KEPT = ("model", "draft", "columns", "overall", "roofline", "weights", "kernels", "differences", "weight_bytes")


def measure_decoding(model: str | None = None, smoke: bool = False) -> Iterator[dict[str, Any]]:
    """The work to be measured, then one row per set of kernels and method, plain decoding beside each:
    `jaxspec-bench`'s report, less its samples."""
    drafting = not smoke and has_draft(model, None)
    names = [BASELINE] if smoke else [name for name in default_methods(drafting) if name != BASELINE]
    prompts = select_prompts(load_prompts(None), None, 1 if smoke else PROMPTS)
    sampling = SamplingParams(max_tokens=8 if smoke else TOKENS, ignore_eos=True)
    sets = ("xla",) if smoke else ("auto", "xla", "pallas-triton")
    words = {(kernels, name): f"{model or 'default model'}, {kernels}, {name}" for kernels in sets for name in names}
    yield {"name": "decode", "device": name_device(), "planned": list(words.values())}
    for kernels in sets:
        method = loading_method(make_columns(names), drafting, given=False)
        llm = LLM(model, method=method, kernels=kernels, session_memory=0)
        for name in names:
            row: dict[str, Any] = {"name": words[kernels, name], "device": name_device(), "kernels": kernels}
            try:
                measured = measure(llm, make_columns([name]), prompts, sampling, REPEATS)
                draft = None if llm.draft_path is None else str(llm.draft_path)
                report = make_report(measured, f"jaxspec-bench --kernels {kernels}", str(llm.model_path), draft)
                row["report"] = {part: report[part] for part in KEPT}
            except Exception as error:
                row["error"] = describe_error(error)
            yield row
