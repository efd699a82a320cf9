"""Stream a text and underline what a draft proposed; then say what drafting brought.

    python examples/stream_drafted.py [PROMPT]

Only tokens that plain decoding would choose too are ever printed: a draft decides the speed and nothing else.
"""

import sys

import jaxspec

PROMPT = "Write a short Python function that counts the words of a text, and explain it in two sentences."
UNDERLINE, PLAIN = "\x1b[4m", "\x1b[0m"


def main() -> None:
    """Print the text in spans, drafted or not, and the counters of the generation."""
    llm = jaxspec.LLM()
    messages = [{"role": "user", "content": " ".join(sys.argv[1:]) or PROMPT}]
    completion = None
    for event in llm.stream(messages, jaxspec.SamplingParams(max_tokens=160)):
        for text, drafted in event.spans:
            print(f"{UNDERLINE}{text}{PLAIN}" if drafted else text, end="", flush=True)
        completion = event.completion
    assert completion is not None
    stats = completion.stats
    print(f"\n\n{len(completion.token_ids)} tokens, {stats.tokens_per_s or 0:.1f} per second")
    counters = stats.speculative_decoding
    assert counters is not None
    print(
        f"{counters.num_spec_steps} passes of the model, {counters.num_accepted_draft_tokens} drafted tokens "
        f"accepted of {counters.num_draft_tokens}: {counters.mean_acceptance_length:.2f} tokens per pass"
    )


if __name__ == "__main__":
    main()
