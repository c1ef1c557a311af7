"""Code that only the `run.json` of a folder names is not code_settings."""

import json
import shlex

import pytest

from klgrad.errors import RunError
from klgrad.training.settings import code_settings, parse, resume_command

REWARD = """
def one(completions, **_):
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"reward": "a.py:f", "kl_coef": 1}, ["reward"]),
        ({"reward": None, "trust_remote_code": False}, []),
        ({"trust_remote_code": True}, ["trust_remote_code"]),
        ({"model_init_kwargs": {"trust_remote_code": True}}, ["model_init_kwargs"]),
        ({"model_init_kwargs": '{"trust_remote_code": true}'}, ["model_init_kwargs"]),
        ({"model_init_kwargs": '{"trust_remote_code": true'}, ["model_init_kwargs"]),
        ({"model_init_kwargs": {"dtype": "float32"}}, []),
        ({"attn_implementation": "sdpa"}, []),
        ({"attn_implementation": "owner/kernel"}, ["attn_implementation"]),
    ],
)
def test_which_settings_execute_code(settings, names):
    assert list(code_settings(settings)) == names


@pytest.fixture
def received(tmp_path):
    """A run folder with settings of somebody else's."""

    def made(**settings):
        folder = tmp_path / "received run"
        folder.mkdir(exist_ok=True)
        content = {"command": "train", "settings": {"use_cpu": True, **settings}}
        (folder / "run.json").write_text(json.dumps(content))
        return folder

    return made


@pytest.mark.parametrize(
    "settings",
    [{"reward": "evil.py:f"}, {"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}],
)
def test_code_of_a_run_folder_has_to_be_named_again(settings, received):
    folder = received(**settings)
    with pytest.raises(RunError) as refused:
        parse("train", ["--output_dir", str(folder), "--resume"])
    program, command, *given = shlex.split(refused.value.remedy.partition(": ")[2])
    assert (program, command) == ("klgrad", "train")
    parsed = parse(command, given)  # exactly what it says to type
    assert all(parsed.given[name] for name in settings)


def test_a_file_that_is_named_counts(received, tmp_path):
    folder = received(reward="mine.py:f")
    (tmp_path / "settings.yaml").write_text("reward: mine.py:f\n")
    given = ["--output_dir", str(folder), "--resume", "--config", str(tmp_path / "settings.yaml")]
    assert parse("train", given).run.reward == "mine.py:f"


def test_code_can_be_refused(received):
    folder = received(trust_remote_code=True)
    given = ["--output_dir", str(folder), "--resume", "--trust_remote_code", "False"]
    assert not parse("train", given).training.trust_remote_code


def test_what_to_type_is_said_after_a_stop(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    assert "--reward mine.py:one" in resume_command("train", tmp_path, {"reward": "mine.py:one"})

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("klgrad.training.callbacks.Recorder.evaluate_on_schedule", interrupted)
    status, text = run("train", "run", reward="mine.py:one", eval_size=0, max_steps=2)
    assert status == 130
    assert "klgrad train --output_dir run --resume --reward mine.py:one" in " ".join(text.split())


@pytest.mark.parametrize(
    "settings",
    [
        {"model_init_kwargs": {"attn_implementation": {"": "owner/kernel"}}},
        {"model_init_kwargs": {"attn_implementation": ["owner/kernel"]}},
        {"model_init_kwargs": {"experts_implementation": "owner/kernel"}},
        {"model_init_kwargs": {"use_kernels": True}},
    ],
    ids=str,
)
def test_kernels_of_the_hub_in_every_form(settings):
    assert code_settings(settings) == settings
