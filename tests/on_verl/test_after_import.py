"""What the plug-in does after an import is done once the module is really imported; verl is not needed here."""

import importlib
import importlib.util
import sys

import pytest

from klgrad.verl.after_import import AfterImport


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that fails while the file `broken` exists."""
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (
        f"from pathlib import Path\nif Path({str(tmp_path / 'broken')!r}).exists():\n    raise RuntimeError('broken')\n"
    )
    (tmp_path / "observed_module.py").write_text(text)
    importlib.invalidate_caches()
    yield "observed_module"
    sys.modules.pop("observed_module", None)


@pytest.fixture
def calls(module):
    found = []
    finder = AfterImport(module, lambda: found.append(module in sys.modules))
    sys.meta_path.insert(0, finder)
    yield found
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def test_it_is_done_after_the_import_and_once(module, calls):
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert calls == [True]
    assert not any(isinstance(finder, AfterImport) and finder.module == module for finder in sys.meta_path)


def test_a_search_for_the_module_does_not_use_it_up(module, calls):
    assert importlib.util.find_spec(module) is not None
    assert calls == []
    importlib.import_module(module)
    assert calls == [True]


def test_an_import_that_fails_does_not_use_it_up(module, calls, tmp_path):
    (tmp_path / "broken").touch()
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module)
    assert calls == []
    (tmp_path / "broken").unlink()
    importlib.import_module(module)
    assert calls == [True]
