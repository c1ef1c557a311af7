"""What libraries underneath warn of during a run is said once each, and nothing of theirs stays changed."""

import logging
import warnings

import pytest

from klgrad.training.libraries import KNOWN, LIBRARIES, messages_once


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
