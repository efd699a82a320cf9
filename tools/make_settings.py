"""Write the settings tables of docs/methods from the methods' own dataclasses.

    python tools/make_settings.py

A table stands between `<!-- settings: CLASS -->` and `<!-- end of settings -->`. Its rows are the fields of the
dataclass `jaxspec.CLASS`: name, type, default, and the field's text in the docstring's section "Attributes". A test
fails if a page is not current.
"""

import dataclasses
import inspect
import re
import types
import typing
from pathlib import Path

import jaxspec

PAGES = Path(__file__).parents[1] / "docs" / "methods"
PLACE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end of settings -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The text of a page with its settings tables made anew.

    Raises:
      KeyError: a field has no text in its class's docstring.
    """
    return PLACE.sub(lambda found: found[1] + settings_table(getattr(jaxspec, found[2])) + found[3], page)


def settings_table(method: type) -> str:
    """Fields of a dataclass as a Markdown table."""
    meanings = attribute_texts(inspect.getdoc(method) or "")
    hints = typing.get_type_hints(method)
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(method):
        cells = (f"`{field.name}`", f"`{type_name(hints[field.name])}`", f"`{_default(field)}`", meanings[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def attribute_texts(docstring: str) -> dict[str, str]:
    """Texts of the section "Attributes" of a docstring, by name, each on one line."""
    texts: dict[str, str] = {}
    _, _, section = docstring.partition("\nAttributes:\n")
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        if entry := re.match(r"  (\w+): (.*)", line):
            name, texts[entry[1]] = entry[1], entry[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    # A symbol of the paper that leads the text, such as "r, share of the blocks", keeps its case.
    return {name: text if text[1:2] == "," else text[:1].upper() + text[1:] for name, text in texts.items()}


def type_name(hint: object) -> str:
    """A type as one writes it."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join(type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(repr(value) for value in typing.get_args(hint))
    if hint is types.NoneType:
        return "None"
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(?:\w+\.)+", "", str(hint))


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else repr(field.default)


def main() -> None:
    """Write the pages."""
    for path in sorted(PAGES.glob("*.md")):
        old = path.read_text(encoding="utf-8")
        new = with_tables(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
