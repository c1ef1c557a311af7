"""The runs of `benchmarks/exp_reuse.py`, by klgrad's trainer and by TRL's own: one student, one evaluation."""

import argparse

import pytest
from training.small import write_model

pytest.importorskip("trl")

import distill_runs
import exp_reuse
import exp_stale_distill as stale
import harness
import packed
import trl_distill_runs

from klgrad.trl import kl_trainer as lag

SMALL = {
    "per_device_train_batch_size": 8, "max_completion_length": 5, "max_steps": 4, "learning_rate": 3e-3,
    "train_size": 32, "eval_size": 4, "use_cpu": "true", "bf16": "false",
}  # fmt: skip

SCHEDULES = {256: "cosine", 64: "constant"}
"""The best ones of made-up runs, by completions of a batch."""


def small(job, **settings):
    """The job on a tiny student, with evaluations every 2 updates."""
    changed = [str(x) for name, value in SMALL.items() for x in (f"--{name}", value)]
    return packed.Job(job.name, {**job.settings, **settings, "every": 2}, [*job.flags, *changed])


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The evaluations of a tiny student by a trainer's name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(exp_reuse, "LAYERS", 2)
    given = argparse.Namespace(model=write_model(tmp_path / "model"))

    def made(trainer):
        job = next(job for job in exp_reuse.trl_sweep(given) if job.settings["trainer"] == "trl-reverse")
        train = (distill_runs if trainer == "klgrad" else trl_distill_runs).train
        return train(small(job, trainer=trainer), tmp_path / trainer)

    return made


@pytest.mark.slow
def test_both_trainers_begin_with_one_student_and_one_evaluation(runs):
    own, trl = runs("klgrad"), runs("trl-reverse")
    assert [[row["update"] for row in rows] for rows in (own, trl)] == [[0, 2, 4]] * 2
    measures = own[0].keys() - {"seconds"}
    assert {name: own[0][name] for name in measures} == {name: trl[0][name] for name in measures}
    for rows in (own, trl):
        assert 0 == rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"]


@pytest.mark.slow
def test_the_evaluation_is_that_of_the_student_that_trl_trains(runs):
    """KL(teacher‖student) is TRL's objective here, and has the same completions at every evaluation."""
    start, *_, end = (row["forward_kl_per_token"] for row in runs("trl-forward"))
    assert end < 0.99 * start


def test_the_clock_counts_training_alone(monkeypatch):
    now = iter([1.0, 3.5, 10.0, 11.0])
    clock = distill_runs.TrainingClock()
    monkeypatch.setattr(distill_runs.time, "perf_counter", lambda: next(now))
    clock.stop()  # before the first evaluation nothing was trained
    for _ in range(2):
        clock.start()
        clock.stop()
    assert clock.seconds == 3.5


@pytest.mark.parametrize(
    ("part", "file", "kind", "arms"),
    [
        ("seeds", "reuse_sweep.csv", "uses", [("4", 256), ("1", 256), ("1", 64), ("2", 64)]),
        ("trl_seeds", "reuse_trl.csv", "trainer", [("trl-reverse", 256), ("trl-reverse", 64)]),
    ],
)
def test_more_seeds_have_the_best_rate_and_schedule_of_the_first(part, file, kind, arms, tmp_path):
    """With batches of 64 the best schedule is another; after 40 updates those runs have not ended."""
    rows = []
    for name, size in arms:
        uses = int(name) if kind == "uses" else 1
        best = {"uses": uses, kind: name, "learning_rate": "0.0003", "schedule": SCHEDULES[size], "seed": 0}
        best |= {"completions": size} if size != 256 else {}
        end = {"update": 10240 // size * uses, "kl_per_token": 0.5}
        other = {**best, "learning_rate": "0.001"}
        rows += [{**best, **end}, {**best, "schedule": "linear", **end, "kl_per_token": 0.6}]
        rows += [{**other, **end, "update": end["update"] // 4, "kl_per_token": 0.1}]
        rows += [{**other, **end, "kl_per_token": float("nan")}, {**other, **end, "seed": 1, "kl_per_token": 0.1}]
    harness.write(rows, tmp_path / file)
    jobs = getattr(exp_reuse, part)(argparse.Namespace(model=tmp_path, out=tmp_path))
    named = [(seed, name, size) for seed in (1, 2, 3) for name, size in arms]
    ends = {256: "", 64: "_64"}
    assert [job.name for job in jobs] == [f"{n}_0.0003_{SCHEDULES[size]}_{seed}{ends[size]}" for seed, n, size in named]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::klgrad.trl.MeaningWarning")  # the lag has no importance weights, on purpose
def test_a_full_queue_begins_with_different_batches_of_the_student_that_others_start_from(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stale, "LAYERS", 2)
    given, trained = argparse.Namespace(model=write_model(tmp_path / "model")), {}
    exchange = lag.LagQueue.exchange

    def watched(queue, fresh):
        found = exchange(queue, fresh)
        trained[name].append(found["completion_ids"].tolist())
        return found

    monkeypatch.setattr(lag.LagQueue, "exchange", watched)
    rows = {}
    for name in ("lag-16", "filled-16"):
        trained[name] = []
        job = next(job for job in stale.jobs(given) if job.name == f"reverse-exact_{name}_0.0003_0")
        rows[name] = stale.train_stale(small(job), tmp_path / name)
    drop = lambda row: {key: value for key, value in row.items() if key != "seconds"}
    assert drop(rows["filled-16"][0]) == drop(rows["lag-16"][0])
    different = {name: len({str(batch) for batch in batches}) for name, batches in trained.items()}
    assert different == {"lag-16": 1, "filled-16": 4}
