"""Load the one file of an installed package that holds its KL code, where the whole package cannot be imported here.

What the file imports and this machine lacks (a GPU library, a server) is replaced, while the file loads, by a stand-in
that accepts everything and computes nothing. The code under audit is the package's own, unchanged.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """Any attribute, call or subscript gives a stand-in again; as a decorator it leaves what it decorates be."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getitem__(self, _: Any) -> "_StandIn":
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


def path_of(distribution: str, ending: str) -> Path:
    """Where an installed distribution keeps the file whose path ends so."""
    for file in files(distribution) or []:
        if str(file).endswith(ending):
            return Path(str(file.locate()))
    raise ImportError(f"{distribution} has no file {ending}; its layout has changed")


def load(
    distribution: str,
    ending: str,
    *,
    stand_ins: tuple[str, ...],
    package: str | None = None,
    loaded: dict[str, ModuleType] | None = None,
) -> ModuleType:
    """Run the file as a module, with stand-ins for the named packages where they cannot be imported.

    Args:
        distribution: the installed package.
        ending: of the file's path in it.
        stand_ins: modules to replace, parents before children.
        package: what the file's relative imports are relative to.
        loaded: files of the same package that were loaded before, by the names that this one imports.
    """
    path = path_of(distribution, ending)
    spec = importlib.util.spec_from_file_location(f"klgrad_loaded_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    if package is not None:
        module.__package__ = package
    with _standing_in(stand_ins, loaded or {}):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _standing_in(names: tuple[str, ...], loaded: dict[str, ModuleType]) -> Iterator[None]:
    missing = [name for name in names if name not in sys.modules and not _importable(name)]
    placed = {name: _StandIn(name) for name in missing} | loaded
    kept = {name: sys.modules.get(name) for name in placed}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _importable(name: str) -> bool:
    """Whether a top-level package is there; a submodule of a package that is audited by one file never is."""
    return "." not in name and importlib.util.find_spec(name) is not None
