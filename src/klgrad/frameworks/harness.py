"""What the modules of the frameworks share: single files of a package, and the losses to audit in them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    # The modules of the frameworks take these names from here.
    from torch import Tensor as Tensor

    from ..audit import Subject as Subject
    from ..audit.probes import Batch as Batch

    Critic = Callable[[Batch], Tensor]
    """A value (B, T) for the prefix before each token."""

Made = TypeVar("Made")

# Load a single file of an installed package, where the whole package cannot be imported.
#
# Imports of the file that are not installed (a GPU library, a server) are replaced, while the file loads, by stand-ins
# that accept every access and compute nothing. The audited code of the package is not changed.


class _StandIn(ModuleType):
    """Every attribute, call and subscript returns a stand-in; as a decorator it returns the decorated function.

    It is false and empty, so that `if ray.is_initialized()` takes the branch without ray. Its attributes can be
    deleted, as a base class it adds nothing, as a context it does nothing, and in a union of types it is one of them.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(name)

    def __call__(self, *args: object, **_: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getitem__(self, _: object) -> _StandIn:
        return self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __delattr__(self, name: str) -> None:
        pass

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def __or__(self, _: object) -> _StandIn:
        return self

    __ror__ = __or__

    def __enter__(self) -> _StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _StandInFinder(MetaPathFinder, Loader):
    """Finds a stand-in for every module at or below the given names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.made: list[str] = []

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _below(fullname, self.names) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.made.append(spec.name)
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def path_of(distribution: str, ending: str) -> Path:
    """The path of the file of an installed distribution that ends with `ending`."""
    for file in files(distribution) or []:
        if str(file).endswith(ending):
            return Path(str(file.locate()))
    raise ImportError(f"{distribution} has no file {ending}; its layout has changed")


def load(
    distribution: str,
    *names: str,
    stand_ins: tuple[str, ...] = (),
    replaced: tuple[str, ...] = (),
    loaded: Mapping[str, ModuleType] | None = None,
) -> dict[str, ModuleType]:
    """Run files of a package as modules, with stand-ins for imports that are not available.

    Args:
        distribution: the installed package.
        names: the files as modules, in order; each can import those before it. A name `a.b` is the file a/b.py, and
            `a.b:c/d` another one.
        stand_ins: modules to replace, together with their submodules: a package (`ray`) only where it is not
            installed, a part of a package (`skyrl.train`) always.
        replaced: packages to replace even where they are installed: those that take long to import, and those that
            the files would change (ms-swift deletes methods of TRL's trainer).
        loaded: files of the same package that are loaded already, by the names that these files import.

    Returns:
        The modules by the last part of their names; of two with the same, the first one. They are not kept in
        `sys.modules`.
    """
    known, modules = dict(loaded or {}), dict[str, ModuleType]()
    for entry in names:
        name, _, file = entry.partition(":")
        path = path_of(distribution, f"{file or name.replace('.', '/')}.py")
        own_name = f"klgrad_loaded_{path.stem}"
        spec = importlib.util.spec_from_file_location(own_name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        module.__package__, module.__spec__ = name.rpartition(".")[0], None  # a spec would name another package
        # A dataclass looks up its module while its class is created.
        with standing_in(stand_ins, known | {own_name: module}, replaced):
            spec.loader.exec_module(module)
        known[name] = module
        modules.setdefault(name.rpartition(".")[2], module)
    return modules


def bare(kind: type[Made], **attributes: object) -> Made:
    """An object of a class that has nothing but what the audited code reads of it."""
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


@contextmanager
def standing_in(
    names: tuple[str, ...], loaded: dict[str, ModuleType] | None = None, replaced: tuple[str, ...] = ()
) -> Iterator[None]:
    """Provide stand-ins as `load` does within the context, for a function that imports when it is called."""
    loaded = loaded or {}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _below(name, replaced)}
    before = {name: sys.modules.get(name) for name in loaded}
    finder = _StandInFinder((*replaced, *(name for name in names if not _importable(name))))
    sys.meta_path.insert(0, finder)
    try:
        for name, module in loaded.items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:  # for `from parent import child`
                setattr(importlib.import_module(parent), child, module)
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in (*finder.made, *loaded):
            _forget(name, before.get(name))
        sys.modules.update(hidden)


def _below(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of the packages or a part of one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _forget(name: str, before: ModuleType | None) -> None:
    """Remove a module from `sys.modules` and from its parent package, or restore the previous one."""
    parent, _, child = name.rpartition(".")
    above = sys.modules.get(parent)
    sys.modules.pop(name, None)
    if before is not None:
        sys.modules[name] = before
    if above is not None and not isinstance(above, _StandIn):
        setattr(above, child, before) if before is not None else vars(above).pop(child, None)


@cache
def _importable(name: str) -> bool:
    """Whether a top-level package is installed; False for a part of a package, which is always replaced."""
    return "." not in name and importlib.util.find_spec(name) is not None


# A loss to audit; and for a KL in the reward scores, a critic, and the remedy.


def named(title: str, settings: Mapping[str, object]) -> str:
    """A title with settings behind it, as in `trl grpo loss_type=dapo`."""
    return " ".join([title, *(f"{name}={value}" for name, value in settings.items())])


def subject(name: str, loss: Callable[[Batch], Tensor], *, k1: str = "", unwhitened: str = "", **more: Any) -> Subject:
    """A loss of a framework, whose name begins with that of the framework; `more` are further fields of `Subject`.

    For a KL in the reward, `k1` and `unwhitened` are what to write instead: settings that select k1, and that stop
    dividing by a batch's deviation.
    """
    from ..audit import Subject
    from ..core.term import Remedy

    reasons = ["in the reward only k1 descends the reverse KL"] if k1 else []
    reasons += ["whitening divides β by the standard deviation of the batch"] if unwhitened else []
    use = (" with ".join(filter(None, [k1, unwhitened])),)
    instead = Remedy(use=use, why="; ".join(reasons)) if reasons else None
    return Subject(name, "framework", loss, instead, framework=name.split()[0], **more)


def of_arrays(loss: Callable[[dict[str, Any]], Any], library: Literal["jax", "mlx"]) -> Callable[[Batch], Tensor]:
    """A loss of the arrays of another library, which are named as the fields of a `Batch`, as a loss of a batch."""
    from ..audit.call import in_torch

    of_tensors = in_torch(loss, library)
    return lambda batch: of_tensors({field.name: getattr(batch, field.name) for field in fields(batch)})


def untrained(batch: Batch) -> Tensor:
    """A critic that is 0 everywhere, as a new value head is. With γλ < 1 GAE then discounts the later KL."""
    return batch.old_logp.new_zeros(batch.old_logp.shape)


def scores(batch: Batch) -> Tensor:
    """(B, T) the score of each completion on its last token: the advantages of the audit, zero by default."""
    last = batch.mask & (batch.mask.cumsum(-1) == batch.mask.sum(-1, keepdim=True))
    return batch.advantages * last
