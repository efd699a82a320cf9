"""`python -m jaxspec COMMAND ...`: the commands, also where their scripts are not on the path."""

import sys

from jaxspec import __version__
from jaxspec.cli import start

COMMANDS = {
    "decode": "a prompt in, streamed text out",
    "serve": "a model served through OpenAI's interface, and a live view",
    "convert": "a checkpoint in jaxspec's own format, quantised if wanted",
    "bench": "decoding methods side by side on the same prompts",
    "check": "whether a method says what plain decoding says",
    "tune": "the fastest method and settings for a model on this machine",
}


def main() -> None:
    """Run the command that the first argument names, or list all of them."""
    start.begin()
    name, arguments = sys.argv[1] if len(sys.argv) > 1 else "--help", sys.argv[2:]
    if name in ("-h", "--help"):
        print("Usage: python -m jaxspec COMMAND [OPTIONS]\n\nEach command is also a script, such as jaxspec-decode:\n")
        for command, line in COMMANDS.items():
            print(f"  {command:<8} {line}")
    elif name == "--version":
        print(f"jaxspec {__version__}")
    elif name not in COMMANDS:
        from jaxspec.errors import suggest

        print(f"jaxspec: error: unknown command {name!r}; {suggest(name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.argv = [f"jaxspec-{name}", *arguments]
        start.run(name)


if __name__ == "__main__":
    main()
