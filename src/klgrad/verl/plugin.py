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
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                # Only now is it done: a module may be looked for without being imported, or its import may fail.
                sys.meta_path.remove(self)
                self.then()

            setattr(spec.loader, "exec_module", run_and_call)  # noqa: B010 (a method)
        return spec


def register() -> None:
    """Register klgrad's trainers. A failure must not stop runs without klgrad; verl refuses those with it."""
    try:
        importlib.import_module("klgrad.verl.trainers")
    except Exception as error:
        text = f"klgrad's trainers are not registered, because they do not import: {type(error).__name__}: {error}"
        warnings.warn(text, stacklevel=2)


def guard() -> None:
    """Make verl's older trainers refuse settings that they would ignore."""
    trainer = sys.modules[OLDER_TRAINERS].RayPPOTrainer
    trainer.config = importlib.import_module("klgrad.verl.declaration").CheckedConfig()


AFTER = {TRAINERS: register, OLDER_TRAINERS: guard}


def install() -> None:
    """Prepare what is done after each import; do it now for a module that is imported already."""
    for module, then in AFTER.items():
        if module in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, AfterImport(module, then))


install()
