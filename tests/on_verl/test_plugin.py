"""The plug-in: it is light, registers klgrad's trainers after verl's, and says why where it cannot."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
from on_verl.configuration import HAS_TRAINERS
from on_verl.whole_runs import environment

pytestmark = pytest.mark.filterwarnings("ignore")
needs_trainers = pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed")


def fresh(code):
    words = [sys.executable, "-W", "ignore", "-c", code]
    env = environment(VERL_USE_EXTERNAL_MODULES="")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200, env=env)
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


def test_it_is_done_after_an_import_that_succeeds_and_once(tmp_path, monkeypatch, after_import):
    """Neither a search for the module nor an import that fails uses it up."""
    monkeypatch.syspath_prepend(str(tmp_path))
    broken, module, calls = tmp_path / "broken", "observed_module", []
    text = f"from pathlib import Path\nif Path({str(broken)!r}).exists():\n    raise RuntimeError('broken')\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.setattr(
        sys, "meta_path", [after_import(module, lambda: calls.append(module in sys.modules)), *sys.meta_path]
    )
    broken.touch()
    assert importlib.util.find_spec(module) is not None
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module)
    assert calls == []
    broken.unlink()
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert calls == [True]
    del sys.modules[module]
