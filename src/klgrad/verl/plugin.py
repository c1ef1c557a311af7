"""The entry point `verl.plugins`: verl imports this module in every process, before anything else of its own.

Importing verl's trainers takes seconds, and most processes do not need them. So the trainers of klgrad are registered
when `verl.trainer.ppo.v1` is imported, right after it; and verl's older trainers refuse settings of klgrad from the
moment that `verl.trainer.ppo.ray_trainer` is imported.

No other module of klgrad imports this one: that it is imported shows that verl has loaded it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

TRAINERS = "verl.trainer.ppo.v1"
"""verl's module that registers its own trainers."""

OLDER_TRAINERS = "verl.trainer.ppo.ray_trainer"
"""verl's module with the base of the trainers that are not registered."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module is imported."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self.then = module, then
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as the other finders find it, with a loader that calls the function after it."""
        if fullname != self.module or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = LoaderWithSequel(spec.loader, self._is_imported)
        return spec

    def _is_imported(self) -> None:
        """Only now is it done: a module may be looked for without being imported, or its import may fail."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.then()


class LoaderWithSequel(importlib.abc.Loader):
    """A loader that calls a function after it has run a module; everything else is the other loader's."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def register() -> None:
    """Register klgrad's trainers. A failure must not stop runs without klgrad, and stops those with it."""
    try:
        importlib.import_module("klgrad.verl.trainers")
    except Exception as error:
        importlib.import_module("klgrad.verl.guards").register(error)


def guard() -> None:
    """Make verl's older trainers refuse settings that they would ignore. A failure must not stop other runs."""
    try:
        importlib.import_module("klgrad.verl.guards").guard_older_trainers(sys.modules[OLDER_TRAINERS])
    except Exception as error:
        warnings.warn(
            f"klgrad: verl's trainers of trainer.use_v1=False do not refuse settings under `klgrad`, and ignore them: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


AFTER = {TRAINERS: register, OLDER_TRAINERS: guard}


def install() -> None:
    """Prepare what is done after each import; do it now for a module that is imported already."""
    waiting = {finder.module for finder in sys.meta_path if isinstance(finder, AfterImport)}
    for module, then in AFTER.items():
        if module in sys.modules:
            then()
        elif module not in waiting:
            sys.meta_path.insert(0, AfterImport(module, then))


install()
