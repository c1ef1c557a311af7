"""Import a user's loss: `path/to/file.py:function` or `package.module:function`.

The file is imported and run: audit only code that you would run.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..errors import LossImportError, UnknownNameError
from .calling import Settings, constructed
from .subject import Subject, as_subject


def load(spec: str, settings: Settings | None = None) -> Subject:
    """Import a loss to audit.

    Args:
        spec: `path/to/file.py:function` or `package.module:function`; a class, an instance of one, or a method of a
            class that needs no arguments will do. The file is run, as a test runner would do.
        settings: values of the loss's own parameters.

    Returns:
        The loss as a subject named by `spec`.

    Raises:
        LossImportError: the file or module cannot be imported.
        UnknownNameError: it has no such name.

    Example:
        >>> import pathlib, tempfile
        >>> from klgrad.audit import load
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "my_losses.py"
        >>> _ = file.write_text("def k2(logp, ref_logp): return (logp - ref_logp) ** 2 / 2")
        >>> load(f"{file}:k2").kind
        'function'
    """
    return as_subject(find(spec), spec, settings)


def find(spec: str) -> object:
    """Import the object behind a name."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise LossImportError(
            "path/to/file.py:function or package.module:function", repr(spec), "add the part after ':'"
        )
    with imports_for(spec):
        loss: Any = module_of(where)
        for part in name.split("."):
            if not hasattr(loss, part):
                raise UnknownNameError(f"name in {where}", name, _own_names(loss))
            if isinstance(loss, type) and isinstance(vars(loss).get(part), FunctionType):  # a method needs an instance
                loss, _ = constructed(loss, loss.__name__, {})
            loss = getattr(loss, part)
        return loss


def _own_names(x: object) -> list[str]:
    """The public names that a file, a class or an object defines; those that a file imports are left out."""
    own = getattr(x, "__name__", None) if isinstance(x, ModuleType) else None
    return [
        name
        for name, value in vars(x).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and (own is None or not isinstance(value, (FunctionType, type)) or value.__module__ == own)
    ]


def module_of(where: str) -> ModuleType:
    """Import a file, or a module by its name."""
    return _from_file(Path(where)) if where.endswith(".py") else _from_package(where)


@contextmanager
def imports_for(spec: str) -> Iterator[None]:
    """Within the context, the code behind a name imports the modules beside it, not others that have their names.

    `a/losses.py` and `b/losses.py` may each have a `helpers.py`, and a test session may have imported a third one.
    Libraries are left as they are. Use it where a loss is loaded and where it is called, since it may import then.

    Args:
        spec: as in `load`; nothing happens for a name of the catalogue or of a framework.
    """
    where = spec if spec.endswith(".py") else spec.rpartition(":")[0]
    if not where:
        yield
        return
    folder = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    others = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in beside and _is_elsewhere(n, folder)}
    for name in others:
        del sys.modules[name]
    known = str(folder) in sys.path
    sys.path.insert(0, str(folder))  # for good, as pytest does: other code may call the loss, which imports then
    try:
        yield
    finally:
        if known:
            sys.path.remove(str(folder))
        replaced = {name.partition(".")[0] for name in others}
        for name in [name for name in sys.modules if name.partition(".")[0] in replaced]:
            del sys.modules[name]
        sys.modules.update(others)


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Whether an imported module is neither in a folder nor of a library."""
    top = name.partition(".")[0]
    module = sys.modules.get(top)
    place = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    if place is None or top in ("__main__", "klgrad") or top in sys.stdlib_module_names:
        return False
    home = Path(place).resolve().parent
    return home != folder and not {"site-packages", "dist-packages"} & set(home.parts)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LossImportError(
            "an existing Python file", str(path), "check the path; it is relative to the current directory"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look up their module there
    with _named_errors(str(path)):
        spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    with _named_errors(name):
        return importlib.import_module(name)


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    argv, sys.argv = sys.argv, [where]  # a script must not parse the arguments of klgrad
    try:
        yield
    except (Exception, SystemExit) as error:
        raise LossImportError(
            f"{where} to import", f"{type(error).__name__}: {error}", "make `python -c 'import ...'` work on it first"
        ) from error
    finally:
        sys.argv = argv
