"""The plug-in: it is light, registers klgrad's trainers after verl's, and says why where it cannot."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
from on_verl.configuration import HAS_TRAINERS, HAS_VERL
from on_verl.whole_runs import environment

from klgrad.errors import ActivationError
from klgrad.verl.declaration import term_of
from klgrad.verl.handshake import check_status, expected_status, from_worker_node, to_worker_node, worker_status
from klgrad.verl.loss import KLLoss

pytestmark = pytest.mark.filterwarnings("ignore")
needs_trainers = pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed")
DECLARATION = term_of({"level": "token", "coef": 0.2})


def report(**changed):
    loss = KLLoss(lambda: None, DECLARATION)
    return {**worker_status(loss), "plugin": True, "where": "process 7 on node-3", **changed}


def test_workers_that_have_everything_pass():
    check_status(expected_status(DECLARATION), [report(), report()])


REFUSED = {
    "plugin": ({"plugin": False}, "received plugin: False in process 7 on node-3"),
    "version": ({"version": "0.0.1"}, "received version: 0.0.1 in process 7 on node-3"),
    "loss": ({"declaration": None}, "received declaration: None in process 7 on node-3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_worker_that_lacks_something_is_named(case):
    changed, sentence = REFUSED[case]
    with pytest.raises(ActivationError) as caught:
        check_status(expected_status(DECLARATION), [report(), report(**changed)])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_report_at_all_is_refused():
    with pytest.raises(ActivationError):
        check_status(expected_status(DECLARATION), [])


def test_another_declaration_in_a_worker_is_refused():
    other = worker_status(KLLoss(lambda: None, term_of({"level": "token", "coef": 0.3})))
    with pytest.raises(ActivationError, match=r"coef=0\.2.*coef=0\.3"):
        check_status(expected_status(DECLARATION), [{**other, "plugin": True}])


def test_this_process_did_not_load_it_by_verl():
    if not HAS_VERL:
        assert not worker_status(None)["plugin"]


def test_what_is_sent_is_received():
    declaration, wanted = from_worker_node(to_worker_node(DECLARATION))
    assert declaration == DECLARATION
    assert wanted == expected_status(DECLARATION)


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
    assert "MeaningError expected trainer.v1.trainer_mode=klgrad_sync with settings under `klgrad`" in said


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
def test_trainers_that_do_not_import_stop_their_own_runs_with_the_reason():
    broken = "import sys; sys.modules['klgrad.verl.trainers'] = None"
    said = fresh(f"{broken}\n{START}\nprint([get_trainer_cls(m).__name__ for m in MODES])\nbuild('klgrad_sync')")
    assert "['PPOTrainerSync', 'PPOTrainerColocateAsync', 'PPOTrainerSeparateAsync']\n" in said, said
    assert "ActivationError expected klgrad's trainers to import; received ModuleNotFoundError" in said


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
