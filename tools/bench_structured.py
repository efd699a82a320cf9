"""Answers with a shape: constrained `auto` and plain decoding, and plain decoding without a constraint, interleaved.

    python tools/bench_structured.py [--model FILE.gguf] [--repeats 3] [--json FILE]

Twenty prompts: records to be extracted from texts, and calls of tools. Tokens per second are those after the first
token of an answer, of all prompts of a repeat. "forced" is the share of tokens that their shape leaves no choice for.
llama.cpp, where it is installed, decodes the extractions under a grammar of the same schemas.

  auto, ar       under the constraint
  free           plain decoding of the same prompts without it, as many tokens as the constrained answer has
"""

import importlib.util
import itertools
import json
import time
from typing import Any

from harness import environment_line, make_parser, make_ratios, make_table, spread_rows, write_report

import jaxspec
from jaxspec.checkpoint.shipped import default_model_path
from jaxspec.llm import internals
from jaxspec.structured.grammar import Grammars

TEXTS = (
    "Ada Lovelace, born in London in 1815, wrote the first published algorithm.",
    "The order of 12 March: three lamps for Maria Rossi in Milan, 149.90 euros, paid by card.",
    "Flight LH 401 leaves New York at 15:40 and reaches Frankfurt at 05:25, gate B23.",
    "Invoice 2024-118 of Nordlicht GmbH: 40 hours at 85 euros, due on 30 April.",
    "The Eiffel Tower in Paris is 330 metres high and was finished in 1889.",
)
RECORDS = (
    {"name": "string", "place": "string", "year": "integer"},
    {"subject": "string", "quantities": "numbers", "is_paid": "boolean"},
)
FORMS = {
    "string": {"type": "string", "maxLength": 40},
    "numbers": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
}
TASKS = ("What is the weather in Oslo tomorrow?", "Add 17 and 25.", "Book a table for two in Rome at 8 pm.",
         "Convert 30 miles to kilometres.", "Remind me to call Anna on Friday.")  # fmt: skip
CALLS = (("get_weather", ("city", "day")), ("calculate", ("expression",)), ("note", ("title", "text")))


def main() -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default=str(default_model_path()))
    arguments = parser.parse_args()
    auto = jaxspec.LLM(arguments.model, session_memory=0)
    plain = auto.with_method("ar")
    cases = list(list_cases())
    shares, lengths = zip(*(count_forced(auto, *case) for case in cases), strict=True)
    runs: dict[str, Any] = {
        "auto": lambda: [answer(auto, *case) for case in cases],
        "ar": lambda: [answer(plain, *case) for case in cases],
        "free": lambda: [free(plain, case[0], length) for case, length in zip(cases, lengths, strict=True)],
    }
    peer = make_peer(arguments.model)
    if peer is not None:
        extractions = [case for case in cases if case[1] is not None]
        runs |= {"llama.cpp": lambda: [peer(*case) for case in extractions]}
        runs |= {"auto, extractions": lambda: [answer(auto, *case) for case in extractions]}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat, (name, run) in itertools.product(range(arguments.repeats + 1), runs.items()):
        done = run()
        if repeat:
            speeds[name].append(sum(tokens for tokens, _ in done) / sum(seconds for _, seconds in done))
    pairs = {"auto / ar": ("auto", "ar"), "ar / free": ("ar", "free")}
    ratios = make_ratios(speeds, pairs | {"auto / llama.cpp, extractions": ("auto, extractions", "llama.cpp")})
    print(f"{environment_line()}\n\nforced: {sum(shares) / sum(lengths):.2f} of {sum(lengths)} tokens\n")
    print(make_table(["tokens per second", "median", "min", "max"], spread_rows(speeds)) + "\n")
    print(make_table(["ratio", "median", "min", "max"], spread_rows(ratios)))
    write_report(arguments.json, speeds=speeds, ratios=ratios, forced=sum(shares), tokens=sum(lengths))


def list_cases() -> Any:
    """Question, schema or None, tools or none of each prompt."""
    for text, fields in itertools.product(TEXTS, RECORDS):
        types = {name: dict(FORMS.get(kind, {"type": kind})) for name, kind in fields.items()}
        schema = {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}
        yield f"Extract a record from this text as JSON.\n\n{text}", schema, ()
    tools = [make_tool(name, fields) for name, fields in CALLS]
    for task, choice in itertools.product(TASKS, (1, 3)):
        yield task, None, tools[:choice]


def make_tool(name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """A tool that takes texts."""
    properties = {field: {"type": "string", "maxLength": 40} for field in fields}
    parameters = {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def ask(llm: Any, question: str, schema: Any, tools: Any) -> jaxspec.Completion:
    """The constrained answer to a question."""
    shape = None if schema is None else jaxspec.StructuredOutputs(json=schema)
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False} if tools else {}
    sampling = jaxspec.SamplingParams(max_tokens=160, structured_outputs=shape)
    return llm.chat([{"role": "user", "content": question}], sampling, **options)


def answer(llm: Any, question: str, schema: Any, tools: Any) -> tuple[int, float]:
    """Tokens after the first, and their seconds."""
    stats = ask(llm, question, schema, tools).stats
    return stats.completion_tokens - 1, stats.decode_s


def free(llm: Any, question: str, length: int) -> tuple[int, float]:
    """The same of an answer of so many tokens without a constraint."""
    sampling = jaxspec.SamplingParams(max_tokens=length, ignore_eos=True)
    stats = llm.chat([{"role": "user", "content": question}], sampling).stats
    return stats.completion_tokens - 1, stats.decode_s


def count_forced(llm: Any, question: str, schema: Any, tools: Any) -> tuple[int, int]:
    """Tokens of an answer for which the shape left no choice, and all."""
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False} if tools else {}
    turn = llm._read([{"role": "user", "content": question}], options)
    shape = None if schema is None else jaxspec.StructuredOutputs(json=schema)
    sampling = llm._shape(turn, jaxspec.SamplingParams(structured_outputs=shape))
    grammars = Grammars(llm.tokenizer, internals(llm).target.cfg.vocab_size, llm.eos_ids)
    matcher = grammars.match(sampling.structured_outputs)
    tokens = ask(llm, question, schema, tools).token_ids
    matcher.take(tokens)
    return matcher.num_forced, len(tokens)


def make_peer(model: str) -> Any:
    """llama.cpp under a grammar; None where it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    import llama_cpp  # pyright: ignore[reportMissingImports]

    peer = llama_cpp.Llama(model, n_ctx=2048, n_threads=2, n_threads_batch=2, verbose=False)

    def run(question: str, schema: Any, tools: Any) -> tuple[int, float]:
        grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        stream = peer.create_chat_completion(
            [{"role": "user", "content": question}], grammar=grammar, temperature=0.0, max_tokens=160, stream=True
        )
        # Tokens that were evaluated up to each event: an event may hold several, or a part of a character none.
        seen = [(peer.n_tokens, time.perf_counter()) for event in stream if event["choices"][0]["delta"].get("content")]
        return seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]

    return run


if __name__ == "__main__":
    main()
