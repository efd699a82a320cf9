"""A jaxspec command as one of several processes, with a log of what its engine runs.

    python command.py LOG COMMAND [OPTIONS]

A line of the log is a program and its devices, or what happens to a session.
"""

import functools
import sys


def main() -> None:
    log = open(sys.argv[1], "w", buffering=1)
    from jaxspec import __main__
    from jaxspec.engine import Engine, Session
    from jaxspec.runtime.program import Program

    def logged(method, describe):
        @functools.wraps(method)
        def run(self, *args):
            print(describe(self), file=log)
            return method(self, *args)

        return run

    Program.__call__ = logged(Program.__call__, lambda own: f"{own.name} on {[d.id for d in own.plan.devices]}")
    Engine.prepare = logged(Engine.prepare, lambda own: f"prepare engine {own.number}")
    for name in ("step", "close"):
        setattr(Session, name, logged(getattr(Session, name), lambda own, name=name: f"{name} session {own.number}"))
    del sys.argv[1]
    __main__.main()


if __name__ == "__main__":
    main()
