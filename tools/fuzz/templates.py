"""Chat templates: grammar-made programs and damaged real ones, rendered for odd messages."""

import random
from pathlib import Path

from fuzz.wild import TEXTS, wild_json, wild_value
from jaxspec.text.chat_template import ChatTemplate

REAL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}"
    "{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}{% if loop.index0 == 0 %}{{ bos_token }}"
    "{% endif %}{{ m.content | trim }}{{ raise_exception('a\nb') if m.role == 'tool' }}{% endfor %}",
    "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m | tojson(indent=2) %}{% endfor %}"
    "{{ ns.s }}{{ strftime_now('%d') }}{% generation %}x{% endgeneration %}",
)
NAMES = ("x", "y", "ns.s", "messages", "messages[0]", "bos_token", "nothing", "loop", "self", "namespace", "dict")
FILTERS = (
    "trim", "tojson", "length", "upper", "list", "string", "int", "join('x')", "center(99999999)", "replace('', 'abc')",
    "indent(9)", "tojson(indent=99)", "batch(3)", "sort", "map('upper')", "first", "pprint", "wordwrap(1)", "xmlattr",
    "groupby('role')", "sum", "unknown", "attr('__class__')", "format(9)", "random", "reverse", "unique",
)  # fmt: skip
METHODS = (
    "strip()", "split('')", "format(x)", "format_map(x)", "ljust(10**9)", "__class__", "append(1)", "items()", "pop()",
)  # fmt: skip


def make_expression(rng: random.Random, depth: int = 3) -> str:
    """A random expression."""
    if not depth:
        return rng.choice((*NAMES, "1", "'a'", "10", "none", "true", repr(rng.choice(TEXTS[:12])).replace("\\x00", "")))
    one, other = make_expression(rng, depth - 1), make_expression(rng, depth - 1)
    match rng.randrange(10):
        case 0:
            return f"({one} {rng.choice(('+', '-', '*', '/', '//', '%', '**', '~'))} {other})"
        case 1:
            return f"({one} {rng.choice(('==', '<', 'in', 'and', 'or', 'is'))} {other})"
        case 2 | 3:
            return f"{one} | {rng.choice(FILTERS)}"
        case 4:
            return f"{one}.{rng.choice(METHODS)}"
        case 5:
            return f"[{one}, {other}]"
        case 6:
            return f"range({rng.choice((3, 100, 99999))})"
        case 7:
            return f"({one} * {rng.choice((2, 1000, 10**7, 10**12))})"
        case 8:
            return f"{one}[{other}:]"
    return one


def make_template(rng: random.Random, depth: int = 3) -> str:
    """A random program."""
    parts = []
    for _ in range(rng.randrange(1, 4)):
        body = make_template(rng, depth - 1) if depth else rng.choice(TEXTS[:12])
        value = make_expression(rng)
        programs = (
            f"{{{{ {value} }}}}",
            f"{{% for x in {value} %}}{body}{{% endfor %}}",
            f"{{% for x in range({rng.choice((3, 50))}) %}}{{% set ns.s = ns.s ~ ns.s %}}{body}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% else %}}y{{% endif %}}",
            f"{{% set x = {value} %}}",
            f"{{% macro x(y) %}}{body}{{{{ x(y) }}}}{{% endmacro %}}",
            f"{{% set y %}}{body}{{% endset %}}",
            f"{{% filter {rng.choice(FILTERS)} %}}{body}{{% endfilter %}}",
            "{" * rng.choice((1, 2, 3000)),
            "{{ " + "(" * (n := rng.choice((10, 300, 3000))) + "1" + ")" * n + " }}",
            "{% if true %}" * (n := rng.choice((5, 90, 600))) + "x" + "{% endif %}" * n,
        )
        parts.append(rng.choice(programs))
    return "".join(parts)


def run(rng: random.Random, folder: Path) -> None:
    """One template."""
    source = "{% set ns = namespace(s='ab') %}" + make_template(rng)
    if rng.random() < 0.4:
        source = rng.choice(REAL)
        at = rng.randrange(len(source))
        source = source[:at] + rng.choice((*TEXTS, "{{", "%}", "}}", "{%", "'")) + source[at + rng.randrange(4) :]
    messages = [{"role": rng.choice(("user", "system", "tool")), "content": rng.choice(TEXTS)} for _ in range(3)]
    if rng.random() < 0.2:
        messages[0]["more"] = wild_json(rng)
    if rng.random() < 0.1:
        messages = wild_value(rng)
    ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
