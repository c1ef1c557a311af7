"""The entry point `verl.plugins`: verl imports this module in every process, before anything else of its own.

Importing verl's trainers takes seconds, and most processes do not need them. So the trainers of klgrad are registered
when `verl.trainer.ppo.v1` is imported, right after it; and verl's older trainers refuse settings of klgrad from the
moment that `verl.trainer.ppo.ray_trainer` is imported.

No other module of klgrad imports this one: that it is imported shows that verl has loaded it.
"""

import importlib
import sys
import warnings

from .after_import import AfterImport

TRAINERS = "verl.trainer.ppo.v1"
"""verl's module that registers its own trainers."""

OLDER_TRAINERS = "verl.trainer.ppo.ray_trainer"
"""verl's module with the base of the trainers that are not registered."""


def register() -> None:
    """Register klgrad's trainers. A failure must not stop runs without klgrad, and stops those with it."""
    try:
        importlib.import_module("klgrad.verl.trainers")
    except Exception as error:
        importlib.import_module("klgrad.verl.guards").register(error)


def guard() -> None:
    """Make verl's older trainers refuse settings that they would ignore. A failure must not stop other runs."""
    try:
        importlib.import_module("klgrad.verl.guards").refuse_settings(sys.modules[OLDER_TRAINERS])
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
