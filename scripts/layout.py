"""The files of the package, with the first sentence of the docstring of each: the table of docs/layout.md."""

import ast
import re
from itertools import groupby
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "klgrad"


def files() -> str:
    """One table for each folder, with one row for each file."""
    paths = sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path.name))
    tables = []
    for folder, inside in groupby(paths, key=lambda path: path.parent):
        rows = "".join(f"| `{path.name}` | {first_sentence(path)} |\n" for path in inside)
        name = folder.relative_to(PACKAGE.parent.parent).as_posix()
        tables.append(f"## `{name}/`\n\n| file | what it has |\n|---|---|\n{rows}")
    return "\n".join(tables)


def first_sentence(path: Path) -> str:
    """The first sentence of the docstring of a module, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if docstring is None:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0].replace("|", r"\|")
