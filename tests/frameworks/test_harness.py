"""Stand-ins accept everything, compute nothing, and leave no trace."""

import importlib
import sys
from types import ModuleType

import pytest

from klgrad.frameworks.harness import load, path_of, standing_in

ABSENT = "no_such_package"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that imports, but for one part of it that needs what is not there."""
    folder = tmp_path / "halfway"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "broken.py").write_text(f"import {ABSENT}")
    monkeypatch.syspath_prepend(tmp_path)
    yield "halfway"
    for name in [n for n in sys.modules if n.split(".")[0] == "halfway"]:
        del sys.modules[name]


def test_a_stand_in_accepts_everything_below_its_name():
    with standing_in((ABSENT,)):
        module = importlib.import_module(f"{ABSENT}.far.below")
        assert module.anything(1, key=2)[3].more is not None
        assert not module.is_initialized()
        assert list(module.names()) == []
        function = lambda: 4
        assert module.decorator(function) is function
    assert not [name for name in sys.modules if name.startswith(ABSENT)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(ABSENT)


def test_what_is_installed_is_not_replaced():
    with standing_in(("json",)):
        assert importlib.import_module("json").loads("[1]") == [1]


def test_what_must_be_replaced_is_replaced_where_it_is_installed_too(package):
    own = importlib.import_module(package)
    with standing_in((), replaced=(package,)):
        assert importlib.import_module(package) is not own
        assert importlib.import_module(f"{package}.broken").name is not None
    assert sys.modules[package] is own
    assert f"{package}.broken" not in sys.modules


def test_a_part_of_a_package_is_replaced_and_put_back(package):
    with standing_in((f"{package}.broken",)):
        assert importlib.import_module(f"{package}.broken").name is not None
    assert not hasattr(sys.modules[package], "broken")
    with pytest.raises(ModuleNotFoundError, match=ABSENT):
        importlib.import_module(f"{package}.broken")


def test_what_was_loaded_before_is_found_by_either_import():
    before = ModuleType("loaded")
    with standing_in((ABSENT,), {f"{ABSENT}.part": before}):
        assert importlib.import_module(f"{ABSENT}.part") is before
        assert importlib.import_module(ABSENT).part is before
    assert f"{ABSENT}.part" not in sys.modules


def test_an_error_in_the_file_leaves_no_trace_either():
    with pytest.raises(TypeError), standing_in((ABSENT,)):
        _ = importlib.import_module(ABSENT).answer / 0
    assert ABSENT not in sys.modules


@pytest.mark.slow
def test_a_file_that_is_not_there_says_so():
    with pytest.raises(ImportError, match=r"torch has no file no/such/file\.py; its layout has changed"):
        path_of("torch", "no/such/file.py")
    with pytest.raises(ImportError):
        load("torch", "no.such.file")
