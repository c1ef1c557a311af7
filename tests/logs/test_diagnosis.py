"""Scalar logs as the real loggers write them; each symptom is found in a run that has it, and in none that has not."""

import json
import math
import random
import re
import sys

import pytest

from klgrad.errors import LogError, MissingExtraError
from klgrad.logs.diagnosis import RunConfiguration, ScalarLog, Series, diagnose, read_scalars
from klgrad.logs.symptoms import SYMPTOMS, link, reference_kls, sampler_kls, threads_of, topics, unrecognised_kls

# What is read: a value that is not finite is kept apart from one that is missing.

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
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
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


@pytest.mark.parametrize("form", ["records", "columns", "csv"])
def test_a_history_of_wandb(tmp_path, form):
    pandas = pytest.importorskip("pandas")
    # What `Api().run(...).history()` returns is such a frame; its `_step` counts calls.
    frame = pandas.DataFrame(ROWS).rename(columns={"step": "train/global_step"}).assign(_step=[0, 7, 14, 21])
    path = tmp_path / ("history.csv" if form == "csv" else "history.json")
    frame.to_csv(path) if form == "csv" else frame.to_json(path, orient=form)
    (log,) = read_scalars(path)
    assert log.series["kl"].finite == Series((1, 4), (0.0, 0.02))  # a CSV has no NaN: both are empty cells


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
    ("files", "message"),
    [
        ({"x.parquet": ""}, "trainer_state.json, a folder"),
        ({"x.json": '{"a": 1}'}, "log_history, a list of rows, or columns"),
        ({"x.json": "{"}, "cut off"),
        ({"x.jsonl": '{"a": 1}\n[1]\n'}, "line 2 of"),
        ({"x.jsonl": 'nonsense\n{"a": 1}\n'}, "line 1 of"),
        ({"x.csv": "name\nx\n"}, "without any"),
        ({"a.jsonl": '{"kl": 1}\n', "b.jsonl": '{"kl": 1}\n'}, "with 2 of them; remedy: name the file"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_a_remedy(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(LogError, match=message):
        read_scalars(tmp_path / next(iter(files)) if len(files) == 1 else tmp_path)


# KLs by their names.


def named(*names):
    return ScalarLog("x", "y", dict.fromkeys(names, Series((1.0,), (1.0,))))


def test_a_kl_to_the_sampler_is_none_to_the_reference():
    log = named("actor/kl_loss", "actor/ppo_kl", "actor/kl_coef", "rollout_corr/k3_kl", "policy/approxkl", "eval_kl")
    assert [metric.name for metric in reference_kls(log)] == ["actor/kl_loss"]
    assert sampler_kls(log) == ["actor/ppo_kl", "rollout_corr/k3_kl", "policy/approxkl"]
    assert unrecognised_kls(log) == []


def test_units_are_those_of_the_trainer():
    assert [x.unit for x in reference_kls(named("kl", "completions/mean_length"))] == ["token"]
    assert [x.unit for x in reference_kls(named("train/kl"))] == [""]
    assert [x.unit for x in reference_kls(named("kl/reverse/k1/per_sequence"))] == ["completion"]
    assert unrecognised_kls(named("loss/kl_to_teacher", "weekly", "kl_target")) == ["loss/kl_to_teacher"]


# Symptoms of one run.

STEPS = tuple(map(float, range(1, 81)))


def log_of(**metrics):
    series = {name.replace("__", "/"): Series(STEPS[: len(x)], tuple(x)) for name, x in metrics.items()}
    return ScalarLog("run", "made here", series)


def healthy(level=0.05, seed=0, n=80):
    """It rises from the reference and settles, with noise."""
    r = random.Random(seed)
    return [level * (1 - math.exp(-i / 12)) * (1 + 0.1 * r.gauss(0, 1)) for i in range(n)]


def noise(level, spread, seed):
    r = random.Random(seed)
    return [level + spread * r.gauss(0, 1) for _ in STEPS]


def changed(values, at, value):
    return [*values[:at], value, *values[at + 1 :]]


def seen(log, **options):
    return [found.symptom.name for found in diagnose([log], **options).observations]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_and_negative_batches_of_an_unbiased_estimate_have_no_symptom(seed):
    length = noise(100, 5, seed)
    log = log_of(kl=healthy(seed=seed), completions__mean_length=length, grad_norm=[1.0 + 0.1 * x for x in length])
    assert seen(log) == []
    values = noise(0.002, 0.01, seed)
    assert min(values) < 0
    assert seen(log_of(kl=values)) == []


HEALTHY = healthy()
NEGATIVE = noise(-0.01, 0.01, 1)
CALM = [0.05 + 1e-6 * (i % 2) for i in range(80)]
RISE = [0.001 * i**1.8 for i in range(80)]
JUMP = [x + 1.5 * (i >= 50) for i, x in enumerate(HEALTHY)]
FALLING = [0.8 - 0.7 * (i >= 50) for i in range(80)]
WIRED = RunConfiguration(facts=frozenset({"both", "stale"}))
LENGTH = [200 * math.exp(x) for x in noise(0, 0.3, 2)]
TOKEN = [x + 0.01 for x in HEALTHY]
WHOLE = [x * n for x, n in zip(TOKEN, LENGTH, strict=True)]
TREND = [0.01 * (1 + i) ** 0.5 * math.exp(x) for i, x in enumerate(noise(0, 0.1, 5))]
LONGER = [100 + 3 * i + random.Random(i).gauss(0, 5) for i in range(80)]


def case(symptoms, evidence, configuration=None, **metrics):
    return symptoms.split(), evidence, configuration or RunConfiguration(), log_of(**metrics)


@pytest.mark.parametrize(
    ("symptoms", "evidence", "configuration", "log"),
    [
        case("zero", "79 of 79", kl=[0.0] * 80),
        case("", "", kl=changed(HEALTHY, 0, 0.0)),  # the policy starts at the reference
        case("", "", kl=[1e-12] * 80),
        case("negative", "over the run", kl=NEGATIVE),
        case("negative", "over its second half", kl=[*healthy(n=40), *NEGATIVE[:40]]),
        case("", "", kl=changed(HEALTHY, 30, -0.001)),
        # one negative value of an estimate that cannot be
        case("negative", "-0.001 at step 31", RunConfiguration(never_negative=True), kl=changed(HEALTHY, 30, -0.001)),
        case("nan", "kl: 1 of 80 values, the first at step 42.", kl=changed(HEALTHY, 41, math.inf)),
        case("nan", "grad_norm: 1 of 80", kl=HEALTHY, grad_norm=[1.0] * 79 + [math.nan]),
        case("spike", "2 at step 51", kl=changed(HEALTHY, 50, 2.0)),
        case("", "", kl=changed(CALM, 40, 0.1)),  # twice its neighbours is no spike
        case("jump", r"at step 51, and stays\.$", kl=JUMP),
        case("jump", "and stays; reward goes from 0.8 to 0.1", kl=JUMP, reward=FALLING),
        case("rising", "in the last", kl=RISE),
        case("", "", kl=[0.1 * i**0.5 for i in range(80)]),
        case("units", "moves with response_length/mean", actor__kl_loss=WHOLE, response_length__mean=LENGTH),
        case("", "", actor__kl_loss=TOKEN, response_length__mean=LENGTH),
        case("", "", actor__kl_loss=TREND, response_length__mean=LONGER),  # a common trend is no common unit
        case(
            "units",
            "^actor/kl_loss is .*: a sum per completion beside a mean per token",
            **{"kl__reverse__k1__per_token": TOKEN, "actor__kl_loss": WHOLE, "length__mean": LENGTH},
        ),
        case("other-kl", "actor/ppo_kl: KLs to the sampler", actor__ppo_kl=HEALTHY),
        case("zero-gradient", "in 20 of 80 steps", kl=HEALTHY, grad_norm=[0.0, 1.0, 1.0, 1.0] * 20),
        case("flat-groups", "60% over the last quarter", kl=HEALTHY, frac_reward_zero_std=[0.2] * 40 + [0.6] * 40),
        case("wiring", "The configuration says so: both.", WIRED, kl=HEALTHY),
    ],
)
def test_a_symptom_is_found_where_it_is_and_nowhere_else(symptoms, evidence, configuration, log):
    found = diagnose([log], [configuration]).observations
    assert [each.symptom.name for each in found] == symptoms
    assert all(re.search(evidence, each.evidence) for each in found)


def test_a_value_that_is_not_logged_is_not_one_that_is_not_finite():
    assert seen(ScalarLog("run", "made here", {"kl": Series(STEPS[::3], tuple(HEALTHY[::3]))})) == []


def test_a_log_without_a_kl_and_the_metric_that_is_named():
    found = diagnose([log_of(reward=healthy())])
    assert not found.observations
    assert "No KL is in this log" in found.runs[0].lines[0]
    assert seen(log_of(actor__ppo_kl=[0.0] * 80), kl="actor/ppo_kl") == ["zero"]
    with pytest.raises(LogError, match="it has reward"):
        diagnose([log_of(reward=healthy())], kl="kl")


# Several runs


@pytest.mark.parametrize(
    ("levels", "betas", "symptoms"),
    [
        ((0.5, 0.5, 0.5), (0.001, 0.01, 0.1), ["constant"]),
        ((0.5, 0.49), (0.01, 0.011), []),  # one β, nearly
        ((0.9, 0.2, 0.5), (0.1, 0.001, 0.01), ["rising-with-beta"]),
        ((0.5, 0.2, 0.05), (0.001, 0.01, 0.1), []),  # as it should be
    ],
)
def test_runs_with_several_betas(levels, betas, symptoms):
    logs = [log_of(kl=healthy(level, seed)) for seed, level in enumerate(levels)]
    found = diagnose(logs, [RunConfiguration(beta=beta) for beta in betas])
    assert [each.symptom.name for each in found.compared] == symptoms
    (line,) = [*found.lines, *(each.evidence for each in found.compared)]
    assert line.startswith("KL of the last quarter up to step 80: ")
    assert f"at β = {min(betas):g}" in line


def test_runs_are_compared_at_a_common_step():
    """A shorter run has a smaller KL, whatever its β."""
    rise = [0.01 * i for i in range(80)]
    logs = [log_of(kl=rise[:20]), log_of(kl=rise)]
    found = diagnose(logs, [RunConfiguration(beta=0.01), RunConfiguration(beta=0.1)])
    assert [x.symptom.name for x in found.compared] == ["constant"]
    assert "up to step 20" in found.compared[0].evidence


def test_a_logged_coefficient_is_the_beta():
    logs = [log_of(actor__kl_loss=healthy(0.5, i), actor__kl_coef=[beta] * 80) for i, beta in enumerate((0.01, 0.1))]
    assert [x.symptom.name for x in diagnose(logs).compared] == ["constant"]


def test_without_coefficients_runs_are_not_compared():
    found = diagnose([log_of(kl=healthy(seed=i)) for i in range(2)])
    assert found.compared == ()
    assert "give their coefficients" in found.lines[0]
    with pytest.raises(LogError, match="3 for 2 runs"):
        diagnose([log_of(kl=healthy())] * 2, [RunConfiguration()] * 3)


# Causes and threads


def test_what_the_configuration_settles_comes_first():
    found = diagnose([log_of(kl=RISE)], [RunConfiguration(facts=frozenset({"cut"}))])
    (rising,) = found.observations
    (first, settled), *rest = rising.causes
    assert settled
    assert first.what.startswith("A clamp on the value")
    assert not any(x for _, x in rest)
    assert rising.to_dict()["causes"][0]["settled_by_configuration"] is True


def test_every_symptom_of_a_thread_exists_and_every_symptom_has_causes():
    assert {name for topic in topics() for name in topic.symptoms.split()} <= set(SYMPTOMS)
    assert all(symptom.causes for symptom in SYMPTOMS.values())
    assert threads_of("jump")[0] == "qiancheng0/ToolRL#52"
    names = [name for topic in topics() for name in topic.names]
    assert len(topics()) == 46
    assert len(names) == len(set(names)) == 81
    assert link("verl-project/verl#751") == "https://github.com/verl-project/verl/issues/751"
