"""What a library refuses before a run has trained is one line that names the library, not a traceback."""

import json

import pytest

from klgrad.errors import KlgradError, SettingError
from klgrad.training.libraries import SHOW_TRACEBACK, refusal

pytestmark = [pytest.mark.filterwarnings("ignore")]


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

    assert refusal(raised(lambda: History(None))) is None


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
    assert not (tmp_path / "run").exists()
