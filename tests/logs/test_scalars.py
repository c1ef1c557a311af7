"""Scalar logs as the real loggers write them; a value that is not finite is kept apart from one that is missing."""

import json
import math

import pytest

from klgrad.errors import LogError, MissingExtraError
from klgrad.logs.scalars import ScalarLog, Series, read_scalars, reference_kls, sampler_kls, unrecognised_kls

ROWS = [
    {"step": 1, "kl": 0.0, "reward": 0.25, "epoch": 0.1},
    {"step": 2, "kl": float("nan"), "reward": 0.5, "epoch": 0.2},
    {"step": 3, "reward": 0.5, "eval_kl": 7.0, "epoch": 0.3},
    {"step": 4, "kl": 0.02, "reward": 0.75, "epoch": 0.4},
]


def is_as_logged(log):
    kl = log.series["kl"]
    assert kl.steps == (1, 2, 4)
    assert math.isnan(kl.values[1])
    assert kl.finite == Series((1, 4), (0.0, 0.02))
    assert log.series["reward"].values == (0.25, 0.5, 0.5, 0.75)


@pytest.mark.slow
def test_the_state_of_a_trainer_and_of_its_last_checkpoint(tmp_path):
    from transformers import TrainerState

    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = TrainerState(global_step=step, log_history=ROWS if step == 10 else ROWS[:1])
        state.save_to_json(str(folder / "trainer_state.json"))
    (log,) = read_scalars(tmp_path)
    assert log.form == "the Trainer of transformers"
    assert log.name.endswith("checkpoint-10/trainer_state.json")
    is_as_logged(log)


def test_event_files_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "runs"))
    for row in ROWS:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, row["step"])
    writer.add_text("args", "beta=0.04")
    writer.close()
    (log,) = read_scalars(tmp_path)
    assert log.form == "TensorBoard"
    assert log.series["kl"].steps == (1, 2, 4)
    assert math.isnan(log.series["kl"].values[1])
    assert "args" not in log.series
    (same,) = read_scalars(next((tmp_path / "runs").iterdir()))
    assert same.series["reward"] == log.series["reward"]


def test_event_files_without_tensorboard_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.backend.event_processing.event_file_loader", None)
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(MissingExtraError, match=r"pip install 'klgrad\[tensorboard\]', or export the scalars as CSV"):
        read_scalars(tmp_path)


def test_the_file_logger_of_verl(tmp_path, monkeypatch):
    tracking = pytest.importorskip("verl.utils.tracking")
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    logger = tracking.FileLogger("project", "run")
    for row in ROWS:
        logger.log({name: value for name, value in row.items() if name != "step"}, row["step"])
    logger.finish()
    is_as_logged(read_scalars(path)[0])


def test_json_lines_in_the_form_of_verl_have_null_for_nan(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = []
    for row in ROWS:
        data = {name: None if value != value else value for name, value in row.items() if name != "step"}
        lines.append(json.dumps({"step": row["step"], "data": data}))
    path.write_text("\n".join(lines) + '\n{"step": 5, "da')  # the run is still writing
    (log,) = read_scalars(path)
    assert log.form == "verl's file logger"
    is_as_logged(log)


@pytest.mark.parametrize("orient", ["records", "columns"])
def test_a_history_of_wandb_as_json(tmp_path, orient):
    pandas = pytest.importorskip("pandas")
    # What `Api().run(...).history()` returns is such a frame; its `_step` counts calls.
    frame = pandas.DataFrame([{"_step": 7 * i, "train/global_step": row.pop("step"), **row} for i, row in rows()])
    path = tmp_path / "history.json"
    frame.to_json(path, orient=orient)
    (log,) = read_scalars(path)
    assert log.series["kl"].finite == Series((1, 4), (0.0, 0.02))


def rows():
    return enumerate([dict(row) for row in ROWS])


def test_a_history_of_wandb_as_csv(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "history.csv"
    pandas.DataFrame(ROWS).rename(columns={"step": "_step"}).to_csv(path)
    (log,) = read_scalars(path)
    assert log.series["kl"] == Series((1, 4), (0.0, 0.02))  # a CSV has no NaN: both are empty cells


def test_a_panel_of_wandb_has_several_runs(tmp_path):
    path = tmp_path / "panel.csv"
    path.write_text(
        '"Step","small - train/kl","small - train/kl__MIN","small - train/kl__MAX","large - train/kl"\n'
        '"1","0.5","0.5","0.5","0.1"\n"2","0.6","0.6","0.6",""\n'
    )
    small, large = read_scalars(path)
    assert (small.name.split(", ")[1], large.name.split(", ")[1]) == ("small", "large")
    assert small.series == {"train/kl": Series((1, 2), (0.5, 0.6))}
    assert large.series == {"train/kl": Series((1,), (0.1,))}


def test_strings_of_wandb_are_numbers(tmp_path):
    path = tmp_path / "history.json"
    path.write_text('[{"_step": 0, "kl": "NaN"}, {"_step": 1, "kl": "Infinity", "name": "x", "done": true}]')
    (log,) = read_scalars(path)
    assert list(log.series) == ["kl"]
    assert [math.isfinite(x) for x in log.series["kl"].values] == [False, False]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.parquet", "", "trainer_state.json, a folder"),
        ("x.json", '{"a": 1}', "log_history, a list of rows, or columns"),
        ("x.json", "{", "cut off"),
        ("x.jsonl", '{"a": 1}\n[1]\n', "list in line 2"),
        ("x.jsonl", 'nonsense\n{"a": 1}\n', "line 1"),
        ("x.csv", "name\nx\n", "without any"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_a_remedy(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(LogError, match=message):
        read_scalars(path)


def test_a_folder_with_two_logs_is_not_guessed_at(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"kl": 1}\n')
    with pytest.raises(LogError, match="with 2 of them; remedy: name the file"):
        read_scalars(tmp_path)


# Names


def log_of(*names):
    return ScalarLog("x", "y", dict.fromkeys(names, Series((1.0,), (1.0,))))


def test_a_kl_to_the_sampler_is_none_to_the_reference():
    log = log_of("actor/kl_loss", "actor/ppo_kl", "actor/kl_coef", "rollout_corr/k3_kl", "policy/approxkl", "eval_kl")
    assert [metric.name for metric in reference_kls(log)] == ["actor/kl_loss"]
    assert sampler_kls(log) == ["actor/ppo_kl", "rollout_corr/k3_kl", "policy/approxkl"]
    assert unrecognised_kls(log) == []


def test_units_are_those_of_the_trainer():
    assert [x.unit for x in reference_kls(log_of("kl", "completions/mean_length"))] == ["token"]
    assert [x.unit for x in reference_kls(log_of("train/kl"))] == [""]
    assert [x.unit for x in reference_kls(log_of("kl/reverse/k1/per_sequence"))] == ["completion"]
    assert unrecognised_kls(log_of("loss/kl_to_teacher", "weekly", "kl_target")) == ["loss/kl_to_teacher"]
