"""Check that methods change no token: greedy, and with sampling under the same seed.

    python examples/check_lossless.py

`jaxspec-check` does the same for your model, and says what the first difference is and how close the choice was.
"""

import jaxspec

PROMPTS = ["Once upon a time there was", "def fibonacci(n):", "1, 2, 3, 5, 8,"]
METHODS = ["auto", "lookup", "specexec"]
SAMPLINGS = {
    "greedy": jaxspec.SamplingParams(max_tokens=32),
    "temperature 0.8, top-p 0.9": jaxspec.SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, seed=7),
}


def main() -> None:
    """Compare each method with plain decoding, token by token."""
    llm = jaxspec.LLM()  # method "auto", so that the draft model is loaded
    plain = llm.with_method("ar")
    for name, sampling in SAMPLINGS.items():
        expected = [out.token_ids for out in plain.generate(PROMPTS, sampling)]
        for method in METHODS:
            found = [out.token_ids for out in llm.with_method(method).generate(PROMPTS, sampling)]
            equal = sum(a == b for a, b in zip(expected, found, strict=True))
            print(f"{name}: {method} {equal} of {len(PROMPTS)} equal")
            assert equal == len(PROMPTS)


if __name__ == "__main__":
    main()
