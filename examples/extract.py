"""Extract a record from a text: the answer is JSON that fits a schema, whatever the model would like to say.

    python examples/extract.py [MODEL]

Needs the extra `structured`: pip install 'jaxspec-decode[structured]'. The default model has 135M parameters: the form
of its answer is right, what it says may not be.
"""

import json
import sys

import jaxspec

TEXT = "Ada Lovelace, born in London in 1815, wrote the first published algorithm. She also played the harp."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "city": {"type": "string", "maxLength": 30},
        "plays": {"type": "array", "items": {"enum": ["piano", "violin", "harp"]}, "maxItems": 3},
    },
    "required": ["name", "born", "city", "plays"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask, parse, print."""
    llm = jaxspec.LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    shape = jaxspec.StructuredOutputs(json=SCHEMA)
    sampling = jaxspec.SamplingParams(max_tokens=200, structured_outputs=shape)
    question = f"Extract the person from this text as JSON.\n\n{TEXT}"
    answer = llm.chat([{"role": "user", "content": question}], sampling)
    print(answer.text)
    person = json.loads(answer.text)
    print(f"{person['name']} was born in {person['city']} in {person['born']}")
    drafted = answer.stats.speculative_decoding
    if drafted is not None:
        print(f"{answer.stats.completion_tokens} tokens in {drafted.num_spec_steps} passes of the model")


if __name__ == "__main__":
    main()
