"""Copies of the package with one fault each, imported under another name."""

import importlib
import itertools
import shutil
from pathlib import Path
from types import ModuleType

import klgrad

PACKAGE = Path(klgrad.__file__).parent
NUMBERS = itertools.count()


def planted(folder: Path, monkeypatch, file: str, sound: str, faulty: str) -> ModuleType:
    """The kernels of a copy in which `sound` is `faulty`."""
    copy = folder / f"klgrad_{next(NUMBERS)}"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "kernels" / file).read_text(encoding="utf-8")
    assert text.count(sound) == 1, f"{file} no longer has the line that this fault replaces"
    (copy / "kernels" / file).write_text(text.replace(sound, faulty), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(f"{copy.name}.kernels")
