"""Copies of the package with one fault each. A fault is (qualified name, sound text, faulty text).

The name is that of the function, class or module whose source has the sound text exactly once, wherever it is defined.
"""

import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import klgrad

PACKAGE = Path(klgrad.__file__).parent


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


def check_caught(folder: Path, fault: tuple[str, str, str], *tests: str, **environment: str) -> None:
    """Tests fail on a copy with the fault, in a process of its own; `tests` are node ids, and options, of pytest."""
    environment = {**os.environ, "PYTHONPATH": str(copy_with_fault(folder, fault=fault).parent), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{fault} is not caught:\n{done.stdout[-2000:]}"


def _source_of(name: str) -> Any:
    """What `inspect` has the source of: the function of a property or of a compiled kernel."""
    found = pkgutil.resolve_name(name)
    for attribute in ("fget", "func", "fn", "function"):
        found = getattr(found, attribute, found)
    return inspect.unwrap(found)
