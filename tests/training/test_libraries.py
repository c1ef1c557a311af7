"""Errors and messages of the libraries underneath."""

import json
import logging
import warnings
from typing import Any

import pytest
from klgrad.training.run import KNOWN, LIBRARIES, SHOW_TRACEBACK, messages_once, refusal

from klgrad.errors import KlgradError, SettingError

pytestmark = [pytest.mark.filterwarnings("ignore")]

# What a library refuses before a run has trained is one line that names the library, not a traceback.


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_of_a_library_is_named():
    import torch.nn.functional as functional

    error = raised(lambda: functional.one_hot("x"))
    assert refusal(error) is None  # raised by C++, called from here: nobody else's
    error = raised(lambda: functional.interpolate(None, size=1, scale_factor=2))
    assert "from torch:" in str(refusal(error))


def test_an_error_of_this_package_keeps_its_traceback():
    from klgrad.training.run_folder import History

    failure: Any = None
    assert refusal(raised(lambda: History(failure))) is None


def test_the_traceback_can_be_asked_for(monkeypatch):
    import torch.nn.functional as functional

    monkeypatch.setenv(SHOW_TRACEBACK, "1")
    assert refusal(raised(lambda: functional.interpolate(None, size=1, scale_factor=2))) is None


@pytest.mark.parametrize("prompts", [["1 + 1", [{"role": "user"}]], ["1 + 1", 3]], ids=str)
def test_prompts_of_mixed_types(prompts, run, tmp_path):
    rows = [{"prompt": prompt, "answer": "2"} for prompt in prompts * 8]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(KlgradError, match="received"):
        run("train", tmp_path / "run", task=tmp_path / "p.jsonl", reward="klgrad.training.data:correct")


def test_a_mode_that_the_compiler_does_not_have(run, tmp_path):
    with pytest.raises(SettingError, match="Unrecognized mode=nonsense"):
        run("train", tmp_path / "run", torch_compile_mode="nonsense")
    assert not list((tmp_path / "run").iterdir())


# What libraries underneath warn of during a run is said once each, and nothing of theirs stays changed.


@pytest.fixture
def said():
    return []


def test_warnings_of_others_are_said_once_each(said):
    with messages_once(said.append):
        for _ in range(3):
            warnings.warn_explicit("the optimizer is odd", UserWarning, "torch/optim.py", 1, module="torch.optim")
            warnings.warn_explicit("soon gone", FutureWarning, "trl/config.py", 1, module="trl.config")
            warnings.warn_explicit("for developers", DeprecationWarning, "trl/config.py", 1, module="trl.config")
            logging.getLogger("trl.trainer.grpo_trainer").warning("importance_sampling_level should be %s", "sequence")
            logging.getLogger("transformers.trainer").info("a detail")
    assert said == ["the optimizer is odd", "soon gone", "importance_sampling_level should be sequence"]


def test_what_no_user_can_change_is_left_out(said):
    with messages_once(said.append):
        for text in KNOWN:
            logging.getLogger("transformers.trainer").warning("%s, and more", text)
        for key in ("lm_head", "model.norm"):  # a head that is tied to the embeddings is not saved
            logging.getLogger("transformers.trainer").warning(
                f"There were missing keys in the checkpoint model loaded: ['{key}.weight']."
            )
    assert said == ["There were missing keys in the checkpoint model loaded: ['model.norm.weight']."]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_afterwards(said, fails):
    import datasets
    from transformers.utils import logging as transformers_logging

    def state():
        loggers = [logging.getLogger(name) for name in LIBRARIES]
        bars = transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
        return [(x.level, x.propagate, list(x.handlers)) for x in loggers], bars, warnings.showwarning

    logging.getLogger("trl").setLevel(logging.DEBUG)
    before = state()
    try:
        with messages_once(said.append):
            assert state() != before
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert state() == before
    logging.getLogger("trl").setLevel(logging.NOTSET)
