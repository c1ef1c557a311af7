"""Runs as a user starts them, disks that fill up, progress, and errors and messages of the libraries underneath."""

import errno
import io
import logging
import os
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch.nn import functional
from training.conftest import contents, invoke, read
from training.small import SMALL, WORDS, arguments, write_model

from klgrad.errors import KernelInputError, KlgradError, MeaningError, ModelError, RunError, SettingError
from klgrad.training import figures
from klgrad.training.build import Models
from klgrad.training.checkpoint import checkpoints, is_complete, last_complete
from klgrad.training.report import model_card
from klgrad.training.run import KNOWN, LIBRARIES, SHOW_TRACEBACK, Recorder, messages_once, progress_bar, refusal
from klgrad.training.run_folder import History
from klgrad.training.settings import LAUNCHED, launch_command, parse

pytestmark = [pytest.mark.filterwarnings("ignore")]

# The commands as a user runs them.

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """A run of each command, through the front door: their folder, and what they printed."""
    base, printed = tmp_path_factory.mktemp("runs"), {}
    with pytest.MonkeyPatch.context() as cache:
        cache.setenv("XDG_CACHE_HOME", str(base / "cache"))
        for command, which in (("train", {"model": model}), ("distill", {"teacher": model})):
            settings = {**SMALL, **which, "output_dir": base / command, "save_steps": 50}
            result = invoke(command, *arguments(**settings))
            assert result.exit_code == 0, result.output
            printed[command] = " ".join(result.output.split())
    return base, printed


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "distill"])
def test_a_run_leaves_everything_and_says_so(command, runs):
    folder, output = runs[0] / command, runs[1][command]
    picture = (folder / "run.png").read_bytes()
    assert picture.startswith(PNG)
    assert int.from_bytes(picture[16:20], "big") == 2000  # 10 inches of 200 dots
    assert b"<svg" in (folder / "run.svg").read_bytes()
    assert (folder / "model" / "config.json").is_file()
    record, summary = read(folder / "run.json"), read(folder / "summary.json")
    assert record["command"] == command
    assert record["versions"]["trl"]
    assert summary["updates"] == summary["after_updates"] == 4
    assert summary["before"]["kl"]["per_token"]["mean"] >= 0
    begins = {"train": "maximises E[reward] - 0.05 KL(π‖ref)", "distill": ":2: maximises -1 KL(π‖ref)"}
    for words in (begins[command], "addition (in-domain, 4)", "KL, nats per token"):
        assert words in output
    for noise in ("it/s", "Warning", "{'loss'", "Loading weights"):
        assert noise not in output


@pytest.mark.parametrize(("command", "kl"), [("train", "E[reward] - 0.05 KL(π‖ref)"), ("distill", "-1 KL(π‖ref)")])
def test_the_model_card_names_the_base_model_and_the_kl(command, kl, runs, model):
    reference = "the base model" if command == "train" else model
    for name in ("README.md", "model/README.md"):
        card = (runs[0] / command / name).read_text(encoding="utf-8")
        for line in (f"reference of the KL: {reference}\n", f"maximises: {kl}\n", "gradient of the KL: ∇ KL(π‖ref)"):
            assert f"- {line}" in card
        assert f"- base model: {model}" in card
        assert "base_model" not in card  # which is for names on the hub


@pytest.mark.parametrize(
    ("name", "base"),
    [("smollm2:20", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("Qwen/Qwen2.5", "Qwen/Qwen2.5")],
)
def test_the_base_model_for_the_hub(name, base):
    card = model_card(parse("train", ["--use_cpu"]), Models(name, "", {}, {}))
    assert f"\nbase_model: {base}\n" in card
    assert f"- base model: {name}" in card


@pytest.mark.slow
def test_a_run_can_leave_its_weights_only(run, tmp_path):
    text = run("train", tmp_path / "run", max_steps=2, eval_every=0, eval_size=1, weights_only=True)
    assert not list((tmp_path / "run").glob("*checkpoint-*"))
    assert "There is no complete checkpoint to make it longer from: --weights_only false keeps them" in text
    assert "Kept are README.md, history.jsonl, model, run.json, summary.json." in text
    again = run("train", tmp_path / "run", resume=True)
    assert "is finished, after 2 updates. There is no complete checkpoint" in again


@pytest.mark.slow
def test_distilling_lowers_the_kl_and_needs_no_reward(run, tmp_path):
    longer = {"max_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 32, "eval_size": 16}
    run("distill", tmp_path / "run", **longer, eval_every=0, save_steps=100)
    summary = read(tmp_path / "run" / "summary.json")
    before, after = (summary[when]["kl"]["per_token"]["mean"] for when in ("before", "after"))
    assert after < 0.95 * before
    assert summary["last_updates"]["task_reward"] is None


def test_a_finished_run_is_not_overwritten_by_default(runs, model):
    result = invoke("train", *arguments(**{**SMALL, "model": model, "output_dir": runs[0] / "train"}))
    assert isinstance(result.exception, RunError)
    assert "--resume continues it, --overwrite replaces it" in str(result.exception)


@pytest.mark.slow
def test_the_training_reward_is_weighed_as_the_held_out_one(run, tmp_path):
    (tmp_path / "two.py").write_text(
        "def one(completions, **_): return [1.0] * len(completions)\n"
        "def ten(completions, **_): return [10.0] * len(completions)\n"
    )
    rewards, weights = f"{tmp_path}/two.py:one,{tmp_path}/two.py:ten", ("--reward_weights", "1", "0.5")
    run("train", tmp_path / "run", *weights, reward=rewards, max_steps=1)
    rows = read(tmp_path / "run" / "history.jsonl")
    assert [row["task_reward"] for row in rows if "evaluation" not in row] == [6.0]
    assert rows[0]["evaluation"]["domains"]["in"]["reward"] == 6.0


# Bad input
@pytest.mark.parametrize(
    ("command", "settings", "error", "said"),
    [
        ("train", {"model": "nobody/nothing"}, ModelError, "check the name"),
        ("distill", {"teacher": "{other}", "model": "{model}"}, KernelInputError, "with one tokenizer"),
        ("distill", {"use_peft": True}, MeaningError, "a teacher without adapters on the student"),
        ("train", {"task": "{prompts}"}, SettingError, "--reward package.module:function"),
        ("distill", {"reward_weights": 1}, MeaningError, "there are no `reward_funcs`"),
        ("train", {"model": None, "model_revision": "v1"}, SettingError, "name the model that has this revision"),
    ],
)
def test_errors_come_before_training(command, settings, error, said, run, model, tmp_path):
    other = write_model(tmp_path / "other", tokens=WORDS[::-1])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1"}\n' * 8)
    places = {"other": other, "model": model, "prompts": tmp_path / "prompts.jsonl"}
    settings = {k: v.format(**places) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(error, match=said):
        run(command, tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "history.jsonl").exists()


@pytest.mark.parametrize("command", ["train", "distill"])
def test_the_short_help_has_the_names_and_defaults_of_the_parser(command):
    from klgrad.cli.train import rows
    from klgrad.training.settings import Parser, preset_of

    parser = Parser(command)
    model = "smollm2" if command == "train" else "smollm2:20"  # two thirds of 30 layers
    defaults = {name: action.default for name, action in parser.actions.items()}
    defaults |= {"model": model, "output_dir": f"runs/{command}", **preset_of(command, {})}
    shown = {flag.removeprefix("--"): text for _, section in rows(command) for flag, text in section}
    assert set(shown) <= {*parser.actions, "model"}
    wanted = {name: "" if (x := defaults[name]) is None or x is False else f"[{x}]" for name in shown}
    assert {name: "[" + text.rpartition("[")[2] if text.endswith("]") else "" for name, text in shown.items()} == wanted


# Several processes


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started; what it sets in its environment is forgotten."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.usefixtures("alone")
def test_several_processes_are_the_same_command_through_accelerate(monkeypatch):
    started, given = [], ["--num_processes", "2", "--kl_coef=0.5", "--quick", "--use_cpu"]
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words) or sys.exit())
    assert invoke("train", *given).exit_code == 0
    assert started[0][:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert "--num_processes=2" in started[0]
    assert started[0][started[0].index("klgrad") :] == ["klgrad", "train", *given]
    assert LAUNCHED in os.environ
    assert launch_command("train", given) is None


@pytest.mark.usefixtures("alone")
def test_a_configuration_of_accelerate_is_launched_with(yaml):
    words = launch_command("train", yaml("accelerate_config: examples/accelerate-fsdp2.yaml\n"))
    assert words is not None
    assert words[3:5] == ["--config_file", "examples/accelerate-fsdp2.yaml"]


FOUR = ("--per_device_train_batch_size=2", "--gradient_accumulation_steps=1", "--num_generations=8", "--use_cpu")
"""A batch that only four processes together can fill."""


@pytest.mark.usefixtures("alone")
def test_what_fits_only_several_processes_is_left_to_them():
    assert launch_command("train", ["--num_processes=4", *FOUR])
    assert "divisible by num_generations" in str(invoke("train", *FOUR).exception)
    # Errors that do not depend on the other processes are raised before these are started.
    assert "did you mean 'kl_coef'" in str(invoke("train", "--num_processes=4", "--kl_coff=1").exception)


@pytest.mark.many
@pytest.mark.slow
def test_two_processes_train_and_write_one_run(model, tmp_path):
    given = {**SMALL, "model": model, "output_dir": tmp_path / "run", "max_steps": 2, "num_processes": 2}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop("LOCAL_RANK", None)
    words = [sys.executable, "-m", "klgrad", "train", *arguments(**given)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "run" / "history.jsonl")
    assert [row["step"] for row in rows if "evaluation" not in row] == [1, 2]
    assert rows[0]["evaluation"]["sets"]["addition"]["count"] == 4
    states = (tmp_path / "run" / "checkpoint-2").glob("klgrad_state_*.pt")
    assert {path.name for path in states} == {"klgrad_state_0.pt", "klgrad_state_1.pt"}
    assert done.stdout.count("addition (in-domain, 4)") == 1


# Comparing
def test_runs_side_by_side(runs, tmp_path):
    result = invoke("compare", *(runs[0] / command for command in runs[1]), "--out", tmp_path / "both.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)
    for part in ("E[reward] - 0.05 KL(π‖ref)", "-1 KL(π‖ref)", "in-domain", "->"):
        assert part in result.output


def test_each_run_has_a_colour_of_its_own(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "draw_run", lambda axes, run, colour: drawn.append(colour))
    figures.render_figure([figures.RunHistory(f"{i}", [], "") for i in range(9)], "png")
    assert len(set(drawn)) == 9


def test_an_unfinished_run_is_drawn_as_far_as_it_came(runs, tmp_path):
    cut = shutil.copytree(runs[0] / "train", tmp_path / "cut")
    lines = (cut / "history.jsonl").read_text().splitlines(keepends=True)
    (cut / "history.jsonl").write_text("".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    (cut / "summary.json").unlink()
    assert invoke("compare", cut, "--out", tmp_path / "x.png").exit_code == 0


def test_a_folder_without_a_run_is_refused(tmp_path):
    for content, said in ((None, "a run's folder, with run.json"), ("{}", "a run with a history"), ("{", "run.json")):
        if content is not None:
            (tmp_path / "run.json").write_text(content)
        assert said in str(invoke("compare", tmp_path, "--out", tmp_path / "x.png").exception)


# A disk that is full: what was there stays, and no half of a checkpoint passes for a whole one.


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


WRITERS = {
    "optimizer": "torch.save",
    "weights": "transformers.modeling_utils.safe_save_file",
    "our state": "klgrad.trl.compat.write_whole",
    "seal": "klgrad.training.checkpoint.write_whole",
    "history": "klgrad.training.run_folder.History.append",
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_writer_that_fails_leaves_the_checkpoints_that_were_there(what, run, parts, monkeypatch):
    before = contents(parts / "checkpoint-4")
    monkeypatch.setattr(WRITERS[what], full)
    with pytest.raises(OSError, match="No space left"):
        run("train", parts, resume=True, max_steps=6)
    assert contents(parts / "checkpoint-4") == before
    assert checkpoints(parts)[0] == last_complete(parts) == parts / "checkpoint-4"
    assert (parts / "model" / "config.json").is_file()


def test_a_model_that_cannot_be_written_leaves_the_one_that_is_there(run, parts, monkeypatch):
    from klgrad.training.checkpoint import RunTrainer

    before, real = contents(parts / "model"), RunTrainer.save_model

    def save_model(self, folder=None, _internal_call=False):
        real(self, folder, _internal_call)
        if not _internal_call:
            full()

    monkeypatch.setattr(RunTrainer, "save_model", save_model)
    with pytest.raises(OSError, match="No space left"):
        run("train", parts, resume=True, max_steps=5)
    assert contents(parts / "model") == before
    assert not (parts / ".model.partial").exists()
    assert is_complete(parts / "checkpoint-5")


# The progress bars of a run.


def test_the_remaining_time_is_known_where_an_update_takes_a_minute():
    bar, now = progress_bar(Console(file=io.StringIO()), shown=True), [0.0]
    bar.get_time = lambda: now[0]
    task = bar.add_task("Training", total=10)
    for step in range(1, 4):
        now[0] += 60
        bar.update(task, completed=step)
    assert bar.tasks[0].time_remaining == 7 * 60


class Watched:
    """Stands for an evaluator of six prompts in two batches; notes the bars that are shown."""

    sets, count = ("some",), 6

    def __init__(self):
        self.recorder: Any = None
        self.seen = []

    def __call__(self, trainer, advanced):
        for _ in range(2):
            advanced(3)
            self.seen.append([(task.description, task.completed, task.total) for task in self.recorder.bar.tasks])
        return {"sets": {}, "domains": {}, "kl": {"per_token": {"mean": 0.5, "standard_error": None}}, "length": 1.0}


def test_an_evaluation_has_a_bar_of_its_own_and_is_announced_without_a_terminal(tmp_path):
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    state = SimpleNamespace(global_step=0, max_steps=1)
    trainer: Any = SimpleNamespace(task_rewards={}, accelerator=accelerator, state=state)
    evaluator: Any = Watched()
    said = io.StringIO()
    evaluator.recorder = Recorder(trainer, History(tmp_path), evaluator, 5, Console(file=said))
    evaluator.recorder.on_train_begin(None, state, None)
    assert [tasks[1] for tasks in evaluator.seen] == [("Evaluating", 3, 6), ("Evaluating", 6, 6)]
    assert [task.description for task in evaluator.recorder.bar.tasks] == ["Training"]
    assert said.getvalue().splitlines() == [
        "evaluating 6 held-out prompts",
        "after 0 updates  KL 0.5 nats per token",
        "training: 0 of 1 update made",
    ]


# What a library refuses before a run has trained is one line that names the library, not a traceback.


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_of_a_library_is_one_line_and_one_of_this_package_is_not_touched(monkeypatch):
    of_torch = raised(lambda: functional.interpolate(None, size=1, scale_factor=2))
    assert "received AttributeError: " in str(refusal(of_torch))
    failure: Any = None
    assert refusal(raised(lambda: History(failure))) is None
    monkeypatch.setenv(SHOW_TRACEBACK, "1")
    assert refusal(of_torch) is None


def test_prompts_of_mixed_types(run, tmp_path, jsonl):
    task = jsonl([{"prompt": prompt, "answer": "2"} for prompt in ("1 + 1", 3) * 8])
    with pytest.raises(KlgradError, match="received"):
        run("train", tmp_path / "run", task=task, reward="klgrad.training.data:correct")


def test_a_mode_that_the_compiler_does_not_have(run, tmp_path):
    with pytest.raises(SettingError, match="Unrecognized mode=nonsense"):
        run("train", tmp_path / "run", torch_compile_mode="nonsense")
    assert not list((tmp_path / "run").iterdir())


# What libraries underneath warn of during a run is said once each, and nothing of theirs stays changed.


def test_warnings_of_others_are_said_once_each():
    said = []
    with messages_once(said.append):
        for _ in range(3):
            warnings.warn_explicit("the optimizer is odd", UserWarning, "torch/optim.py", 1, module="torch.optim")
            warnings.warn_explicit("soon gone", FutureWarning, "trl/config.py", 1, module="trl.config")
            warnings.warn_explicit("for developers", DeprecationWarning, "trl/config.py", 1, module="trl.config")
            logging.getLogger("trl.trainer.grpo_trainer").warning("importance_sampling_level should be %s", "sequence")
            logging.getLogger("transformers.trainer").info("a detail")
    assert said == ["the optimizer is odd", "soon gone", "importance_sampling_level should be sequence"]


def test_what_no_user_can_change_is_left_out():
    said, warning = [], logging.getLogger("transformers.trainer").warning
    with messages_once(said.append):
        for text in KNOWN:
            warning("%s, and more", text)
        for key in ("lm_head", "model.norm"):  # a head that is tied to the embeddings is not saved
            warning(f"There were missing keys in the checkpoint model loaded: ['{key}.weight'].")
    assert said == ["There were missing keys in the checkpoint model loaded: ['model.norm.weight']."]


def test_everything_is_as_before_afterwards():
    import datasets
    from transformers.utils import logging as transformers_logging

    def state():
        loggers = [logging.getLogger(name) for name in LIBRARIES]
        bars = transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
        return [(x.propagate, list(x.handlers)) for x in loggers], bars, warnings.showwarning

    before = state()
    with pytest.raises(KeyError), messages_once(print):
        raise KeyError
    assert state() == before
