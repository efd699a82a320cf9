"""A chat in the terminal with the default model: the text streams, and the conversation goes on.

    python examples/chat.py [MODEL]

Ctrl-D or an empty line ends it. Without a terminal, a short conversation is played instead.
"""

import sys
from collections.abc import Iterator

import jaxspec

PLAYED = ["Name the three primary colours.", "Which of them is the colour of the sea?"]


def questions() -> Iterator[str]:
    """The lines that the user types, or the short conversation."""
    if not sys.stdin.isatty():
        for question in PLAYED:
            print(f"> {question}")
            yield question
        return
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if not question:
            return
        yield question


def main() -> None:
    """Answer questions, each with all that was said before."""
    llm = jaxspec.LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    sampling = jaxspec.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200, seed=1)
    messages: list[dict[str, str]] = []
    for question in questions():
        messages.append({"role": "user", "content": question})
        answer = ""
        for event in llm.stream(messages, sampling):
            print(event.text, end="", flush=True)
            answer += event.text
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
