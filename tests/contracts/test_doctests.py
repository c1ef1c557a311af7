"""The examples in docstrings run, and every public name has one."""

import doctest
import inspect
from importlib import import_module
from pkgutil import walk_packages

import pytest

import klgrad

ROOMS = ("audit", "core", "enumeration", "errors", "kernels", "logs", "remedies", "reports", "targets", "zoo")
"""The parts of the package whose examples are run."""

UNDOCUMENTED = {"trl"}
"""Public subpackages outside of these rooms."""


def modules():
    for room in ROOMS:
        module = import_module(f"klgrad.{room}")
        yield module.__name__
        yield from (found.name for found in walk_packages(getattr(module, "__path__", []), f"{module.__name__}."))


@pytest.mark.parametrize("name", list(modules()))
def test_the_examples_run(name):
    assert doctest.testmod(import_module(name)).failed == 0


def public():
    """Public functions and classes by name, with those of the public modules."""
    names = {name: getattr(klgrad, name) for name in klgrad.__all__ if name not in UNDOCUMENTED}
    for module in [name for name, x in names.items() if inspect.ismodule(x)]:
        inside = names.pop(module)
        own = {name: x for name, x in vars(inside).items() if callable(x) and not name.startswith("_")}
        names |= {f"{module}.{name}": x for name, x in own.items() if x.__module__.startswith(inside.__name__)}
    return names


@pytest.mark.parametrize("name", public())
def test_a_public_name_has_an_example_and_describes_what_it_returns(name):
    value = public()[name]
    described = inspect.getdoc(value) or ""
    assert ">>> " in described
    is_function = inspect.isfunction(value) or hasattr(value, "cache_info")  # a cached function has another type
    assert is_function == ("Returns:" in described)
