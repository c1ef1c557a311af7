"""Find a user's loss: `path/to/file.py:function` or `package.module:function`.

The file is imported and run, as a test runner would: audit only code that you would run.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ..errors import LossImportError, UnknownNameError
from .subject import Subject, as_subject


def load(spec: str) -> Subject:
    """Import the function and make it a subject."""
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
    return as_subject(loss, name=spec)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LossImportError("an existing Python file", str(path), "check the path; it is relative to where you are")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look their module up there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(str(path), error) from error
    finally:
        sys.path.pop(0)
    return module


def _from_package(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _failed(name, error) from error
    finally:
        sys.path.pop(0)


def _failed(where: str, error: Exception) -> LossImportError:
    return LossImportError(
        f"{where} to import", f"{type(error).__name__}: {error}", "make `python -c 'import ...'` work on it first"
    )
