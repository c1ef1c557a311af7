"""The plug-in: it is light, registers klgrad's trainers after verl's, and says why where it cannot."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
from on_verl.configuration import HAS_TRAINERS
from on_verl.whole_runs import environment

from klgrad.errors import ActivationError
from klgrad.verl.declaration import from_worker_node, term_of, to_worker_node

pytestmark = pytest.mark.filterwarnings("ignore")
needs_trainers = pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed")
DECLARATION = term_of({"level": "token", "coef": 0.2})


def test_a_worker_is_told_what_is_declared_and_by_which_version():
    node = to_worker_node(DECLARATION)
    assert from_worker_node(node) == DECLARATION
    with pytest.raises(ActivationError, match=r"klgrad 0\.0\.1, the driver's version, on every node; received"):
        from_worker_node({**node, "version": "0.0.1"})


def fresh(code, **variables):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**environment(**variables), "VERL_USE_EXTERNAL_MODULES": ""},
    )
    return done.stdout + done.stderr


START = """
import sys, verl
from omegaconf import OmegaConf
print("light:", "klgrad.verl.plugin" in sys.modules, "klgrad.verl.trainers" in sys.modules)
from verl.trainer.ppo.v1 import get_trainer_cls

def build(mode):
    try:
        get_trainer_cls(mode)(OmegaConf.create({"klgrad": {}}))
    except Exception as error:
        print(type(error).__name__, error)

MODES = ("sync", "colocate_async", "separate_async")
"""


@pytest.mark.slow
@needs_trainers
def test_verl_loads_it_and_the_trainers_are_registered():
    registered = 'print([issubclass(get_trainer_cls("klgrad_" + m), get_trainer_cls(m).__base__) for m in MODES])'
    said = fresh(f"{START}\n{registered}\nbuild('sync')")
    assert "light: True False\n[True, True, True]\n" in said, said
    assert "with settings under `klgrad`; received PPOTrainerSync, which trains without them" in said


OLDER = {
    "RayPPOTrainer": "trainer.ppo.ray_trainer",
    "OneStepOffRayTrainer": "experimental.one_step_off_policy.ray_trainer",
    "FullyAsyncTrainer": "experimental.fully_async_policy.fully_async_trainer",
    "FullyAsyncRollouter": "experimental.fully_async_policy.fully_async_rollouter",
}
"""verl's trainers that are not registered, and their modules."""

ASSIGN = """
from importlib import import_module
from omegaconf import OmegaConf
import verl

def assign(kind, config):
    trainer = object.__new__(kind)
    try:
        trainer.config = OmegaConf.create(config)
        print(kind.__name__, "has", trainer.config)
    except Exception as error:
        print(type(error).__name__, error)

for name, module in OLDER.items():
    kind = getattr(import_module(f"verl.{module}"), name)
    if hasattr(kind, "__ray_metadata__"):
        kind = kind.__ray_metadata__.modified_class
    assign(kind, {"trainer": {}})
    assign(kind, {"trainer": {}, "klgrad": {}})
"""


@pytest.mark.slow
@needs_trainers
def test_trainers_that_would_ignore_the_settings_refuse_them():
    said = fresh(f"OLDER = {OLDER}\n{ASSIGN}")
    for name in OLDER:
        assert f"{name} has {{'trainer': {{}}}}\n" in said, said
        assert f"with settings under `klgrad`; received {name}, which trains without them" in said, said


@pytest.mark.slow
@needs_trainers
def test_trainers_that_do_not_import_leave_verls_own_and_say_why():
    broken = "import sys, warnings; sys.modules['klgrad.verl.trainers'] = None; warnings.simplefilter('always')"
    said = fresh(f"{broken}\n{START}\nprint([get_trainer_cls(m).__name__ for m in MODES])\nbuild('klgrad_sync')")
    assert "['PPOTrainerSync', 'PPOTrainerColocateAsync', 'PPOTrainerSeparateAsync']\n" in said, said
    assert "klgrad's trainers are not registered, because they do not import: ModuleNotFoundError" in said, said
    assert "Unknown trainer 'klgrad_sync'" in said, said


# What is done once another module is really imported; verl is not needed here.


@pytest.fixture(scope="module")
def after_import():
    """`AfterImport` of a copy of the plug-in: the plug-in itself is imported by verl alone."""
    spec, finders = importlib.util.find_spec("klgrad.verl.plugin"), list(sys.meta_path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    sys.meta_path[:] = finders
    return copy.AfterImport


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
def calls(module, after_import):
    found = []
    finder = after_import(module, lambda: found.append(module in sys.modules))
    sys.meta_path.insert(0, finder)
    yield found
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def test_it_is_done_after_the_import_and_once(module, calls, after_import):
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert calls == [True]
    assert not any(isinstance(finder, after_import) and vars(finder)["module"] == module for finder in sys.meta_path)


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
