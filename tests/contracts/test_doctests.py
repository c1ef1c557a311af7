"""The examples in docstrings run, and every public name has one."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import klgrad

UNDOCUMENTED = {"trl"}
"""Public subpackages whose names need no example yet."""


def modules():
    """Modules with examples, found by reading the files: importing all of them would take seconds."""
    package = Path(klgrad.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(package).with_suffix("").parts
            yield ".".join(["klgrad", *parts]).removesuffix(".__init__")


NEED_TRL = ("klgrad.training.", "klgrad.trl.")
"""Slow, because importing TRL is."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(NEED_TRL)) for name in modules()]
)
def test_the_examples_run(name):
    done = doctest.testmod(import_module(name))
    assert done.failed == 0
    assert done.attempted > 0


def public():
    """Public functions and classes by name, with those of the public modules."""
    names = {name: getattr(klgrad, name) for name in klgrad.__all__ if name not in UNDOCUMENTED}
    for module in [name for name, x in names.items() if inspect.ismodule(x)]:
        inside = names.pop(module)
        own = {
            name: x
            for name, x in vars(inside).items()
            if callable(x) and name in getattr(inside, "__all__", [name.lstrip("_")])
        }
        names |= {f"{module}.{name}": x for name, x in own.items() if x.__module__.startswith(inside.__name__)}
    return names


@pytest.mark.parametrize("name", public())
def test_a_public_name_has_an_example_and_describes_what_it_returns(name):
    value = public()[name]
    described = inspect.getdoc(value) or ""
    assert ">>> " in described
    is_function = inspect.isfunction(value) or hasattr(value, "cache_info")  # a cached function has another type
    assert is_function == ("Returns:" in described)
