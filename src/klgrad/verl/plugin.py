"""The entry point `verl.plugins`: verl imports this module in every process, before anything else of its own.

Importing verl's trainers takes seconds, and most processes do not need them. So the trainers of klgrad are registered
when `verl.trainer.ppo.v1` is imported, right after it.

No other module of klgrad imports this one: that it is imported shows that verl has loaded it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TRAINERS = "verl.trainer.ppo.v1"
"""verl's module that registers its own trainers."""


class AfterTrainers(importlib.abc.MetaPathFinder):
    """Calls `register` once verl's trainers are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as the other finders find it, with a loader that calls `register` after it."""
        if fullname != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = LoaderWithSequel(spec.loader)
        return spec


class LoaderWithSequel(importlib.abc.Loader):
    """A loader that calls `register` after it has run a module; everything else is the other loader's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the other loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then register."""
        self._loader.exec_module(module)
        register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def register() -> None:
    """Register klgrad's trainers. A failure must not stop runs without klgrad, and stops those with it."""
    try:
        importlib.import_module("klgrad.verl.trainers")
    except Exception as error:
        importlib.import_module("klgrad.verl.refused_trainers").register(error)


def install() -> None:
    """Prepare the registration; if verl's trainers are imported already, register now."""
    if TRAINERS in sys.modules:
        register()
    elif not any(isinstance(finder, AfterTrainers) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterTrainers())


install()
