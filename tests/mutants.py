"""Copies of the package with one fault each. A fault is (qualified name, sound text, faulty text).

The name is that of the function, class or module whose source has the sound text exactly once, wherever it is defined.
"""

import importlib
import inspect
import itertools
import pkgutil
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import klgrad

PACKAGE = Path(klgrad.__file__).parent
NUMBERS = itertools.count()


def copy_with_fault(folder: Path, name: str = "klgrad", fault: tuple[str, str, str] | None = None) -> Path:
    """A copy of the package in a folder, under a name, with a fault or with none."""
    copy = folder / name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.csv"))
    if fault is not None:
        where, sound, faulty = fault
        source = _source_of(where)
        lines, first = inspect.getsourcelines(source)
        text = "".join(lines)
        assert text.count(sound) == 1, f"{where} no longer has the text that this fault replaces: {sound}"
        file = Path(str(inspect.getsourcefile(source)))
        whole = file.read_text(encoding="utf-8").splitlines(keepends=True)
        start = max(first - 1, 0)  # a module begins at line 0
        whole[start : start + len(lines)] = [text.replace(sound, faulty)]
        (copy / file.relative_to(PACKAGE)).write_text("".join(whole), encoding="utf-8")
    return copy


def planted(folder: Path, monkeypatch, *fault: str) -> ModuleType:
    """The kernels of a copy with this fault, imported under another name."""
    copy = copy_with_fault(folder, f"klgrad_{next(NUMBERS)}", fault or None)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(f"{copy.name}.kernels")


def module_in(copy: str, name: str) -> ModuleType:
    """The module of a copy, of the name `copy`, that stands for the module `name` of the package."""
    return importlib.import_module(name.replace("klgrad", copy, 1))


def _source_of(name: str) -> Any:
    """What `inspect` has the source of: the function of a property or of a compiled kernel."""
    found = pkgutil.resolve_name(name)
    for attribute in ("fget", "func", "fn", "function"):
        found = getattr(found, attribute, found)
    return inspect.unwrap(found)
