"""Find a user's loss: `path/to/file.py:function` or `package.module:function`.

The file is imported and run, as a test runner would: audit only code that you would run.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ..errors import LossImportError, UnknownNameError
from .subject import Subject, as_subject


def load(spec: str) -> Subject:
    """Import the function and make it a subject."""
    return as_subject(find(spec), name=spec)


def find(spec: str) -> object:
    """Import whatever stands behind the name."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise LossImportError(
            "path/to/file.py:function or package.module:function", repr(spec), "add the part after ':'"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    loss = module
    for part in name.split("."):
        if not hasattr(loss, part):
            raise UnknownNameError(f"name in {where}", name, [n for n in vars(loss) if not n.startswith("_")])
        loss = getattr(loss, part)
    return loss


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LossImportError("an existing Python file", str(path), "check the path; it is relative to where you are")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look their module up there
    _import_from(str(path.resolve().parent))
    with _named_errors(str(path)):
        spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    _import_from(os.getcwd())
    with _named_errors(name):
        return importlib.import_module(name)


def _import_from(folder: str) -> None:
    """Let imports find what stands beside the file, now and when the loss is called, as pytest does."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    argv, sys.argv = sys.argv, [where]  # a script that parses arguments must not see ours
    try:
        yield
    except (Exception, SystemExit) as error:
        raise LossImportError(
            f"{where} to import", f"{type(error).__name__}: {error}", "make `python -c 'import ...'` work on it first"
        ) from error
    finally:
        sys.argv = argv
