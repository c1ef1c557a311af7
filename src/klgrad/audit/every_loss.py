"""Every loss of a file."""

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from ..core.term import KLTerm
from ..errors import LossCallError, LossImportError
from .calling import Settings, loss_methods, own_settings
from .loading import imports_for, module_of
from .subject import Subject, as_subject


class Found(NamedTuple):
    """The losses of a file, and why its other functions, modules and classes are not audited.

    Attributes:
        subjects: the losses, in the order of the file.
        skipped: name to reason; a class is there if it has a method that takes tensors of an audit.
    """

    subjects: list[Subject]
    skipped: dict[str, str]


def load_every(path: str, settings: Settings | None = None) -> Found:
    r"""Import every loss of a file.

    Args:
        path: a Python file. It is run, as a test runner would do.
        settings: values of the losses' own parameters; each loss gets those that it has.

    Returns:
        The public functions, modules and terms that are defined in the file and take tensors of an audit by name,
        as subjects named `path:name`; and the reasons for leaving out the others.

    Raises:
        LossImportError: the file cannot be imported, or none of its functions is a loss.

    Example:
        >>> import pathlib, tempfile
        >>> from klgrad.audit import load_every
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "my_losses.py"
        >>> _ = file.write_text("def k1(logp, ref_logp): return logp - ref_logp\ndef scaled(x): return 2 * x")
        >>> found = load_every(str(file))
        >>> len(found.subjects), list(found.skipped)
        (1, ['scaled'])
    """
    subjects, skipped = [], {}
    with imports_for(path):
        for name, loss in _candidates(module_of(path)):
            if inspect.isclass(loss) and not _makes_callables(loss):
                methods = " ".join(f"{path}:{name}.{method}" for method in loss_methods(loss))
                skipped[name] = f"a class that cannot be called; name the loss: {methods}"
                continue
            try:
                subjects.append(as_subject(loss, f"{path}:{name}", own_settings(loss, settings or {})))
            except LossCallError as error:
                skipped[name] = f"{error.received}; {error.remedy}"
    if not subjects:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise LossImportError(
            f"a loss in {path}", reasons or "no public function or module", f"name one: {path}:function"
        )
    return Found(subjects, skipped)


def _candidates(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public callables that the file defines, once each."""
    seen: set[int] = set()
    public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in public:
        x = getattr(module, name, None)
        if _is_defined_in(x, module) and id(x) not in seen:
            seen.add(id(x))
            yield name, x


def _is_defined_in(x: object, module: ModuleType) -> bool:
    if isinstance(x, (KLTerm, functools.partial)):
        return True
    if inspect.isclass(x):
        return x.__module__ == module.__name__ and bool(_makes_callables(x) or loss_methods(x))
    if inspect.isfunction(x):
        code = inspect.unwrap(x).__code__
        return Path(code.co_filename) == Path(str(module.__file__))
    return isinstance(x, nn.Module) or (callable(x) and type(x).__module__ == module.__name__)


def _makes_callables(cls: type) -> bool:
    return issubclass(cls, nn.Module) or any("__call__" in vars(base) for base in cls.__mro__)
