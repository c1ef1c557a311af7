"""The queue of runs for a GPU: in which order they start, what is kept after a kill, and which files it reads."""

import argparse
import math
import tarfile
import time
from pathlib import Path

import pytest
from training.small import evaluated

pytest.importorskip("trl")

import exp_stale_distill
import experiment
import gpu_queue as queue
import harness
import packed

from klgrad.training.settings import parse

ROOT = Path(__file__).parents[2]


def task(name, **needs):
    return packed.Task(packed.Job(name, {"job": name}), evaluated, Path(), **needs)


@pytest.mark.parametrize(
    ("running", "workers", "gib", "seconds", "expected"),
    [
        ([], 9, 30, 999, "long"),
        ([], 9, 30, 300, "wide"),
        ([10], 9, 30, 300, "wide"),
        ([20], 9, 30, 300, None),
        ([20], 9, 30, 50, "small"),
        ([10], 1, 30, 999, None),
        ([], 9, 5, 999, "long"),
        ([], 9, 30, 5, None),
    ],
    ids=["first", "no time", "fits", "waits for memory", "only the last ends in time", "workers", "alone", "over"],
)
def test_which_run_starts(running, workers, gib, seconds, expected):
    """Later runs do not pass one that waits for memory, or it would wait for ever; they pass one without time."""
    waiting = [task("long", gib=10, seconds=600), task("wide", gib=20, seconds=200)]
    waiting.append(task("small", gib=5, seconds=20))
    busy = [task("other", gib=each, kind="other") for each in running]
    found = packed._next(waiting, busy, workers, gib, seconds, lambda each: each.seconds)
    assert (found and found.job.name) == expected


def test_few_of_a_kind_run_at_once():
    waiting = [task("b", kind="wide", at_once=1), task("c", kind="other")]
    found = packed._next(waiting, [task("a", kind="wide")], 9, math.inf, 999, lambda each: 0)
    assert found.job.name == "c"


@pytest.mark.slow
@pytest.mark.many
def test_finished_runs_are_recorded_once_and_failed_ones_tried_again(monkeypatch, tmp_path):
    """One result is there already, without its rows, as after a kill; rows with a problem are left out."""
    (tmp_path / "runs" / "made").mkdir(parents=True)
    (tmp_path / "runs" / "made" / "before.json").write_text('[{"update": 0}]', encoding="utf-8")
    jobs = [packed.Job(name, {"job": name, "fails": name == "fails"}) for name in ("before", "fails", "new")]
    monkeypatch.setattr(queue, "runs", lambda given: [(jobs, evaluated, "made.csv", {"gib": 1.0})])
    out, runs = tmp_path / "out", tmp_path / "runs"
    given = argparse.Namespace(out=out, runs=runs, only="", workers=2, gib=2.5)
    queue.train_all(given, time.monotonic() + 60)
    recorded = lambda: [(row["job"], row["update"]) for row in harness.read(out / "made.csv")]
    assert recorded() == [("before", "0"), ("new", "0"), ("new", "1")]
    assert (runs / "made" / "fails.log").read_text(encoding="utf-8").count("ValueError: as asked\n") == 4
    with tarfile.open(runs / "archive.tar.gz") as archive:
        assert {"recorded/made.csv", "logs/made/new.log"} <= set(archive.getnames())
    queue.train_all(given, time.monotonic() - 1)
    assert len(recorded()) == 3


def test_a_file_without_names_is_searched_by_settings(tmp_path):
    """The files of Fig. 8 have no column of names."""
    jobs = [packed.Job(f"a_{seed}", {"arm": "a", "rate": 0.1, "seed": seed}) for seed in (0, 1)]
    experiment.add([{**jobs[0].settings, "update": 0}], tmp_path / "made.csv")
    assert experiment.missing(jobs, tmp_path / "made.csv") == jobs[1:]


def test_a_write_that_fails_leaves_the_file(tmp_path):
    path = tmp_path / "made.csv"
    harness.write([{"a": 1}], path)
    before = path.read_bytes()

    class Stops:
        def __str__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.write([{"a": 2}, {"a": Stops()}], path)
    assert path.read_bytes() == before


def test_the_files_with_tests_for_a_gpu():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.name != Path(__file__).name and "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    }
    assert set(queue.GPU_TESTS) == marked


@pytest.mark.filterwarnings("ignore::klgrad.trl.MeaningWarning")  # some arms are unsound on purpose
def test_every_run_is_accepted_and_named_once_in_its_file(tmp_path):
    (tmp_path / "teacher-fixed-length").mkdir()
    given = argparse.Namespace(model=tmp_path, teacher=tmp_path, runs=tmp_path, out=harness.RECORDED)
    found = queue.runs(given)
    names = [(file, job.name) for jobs, _, file, _ in found for job in jobs]
    assert len(names) == len(set(names))
    for jobs, _, file, _ in found:
        assert (harness.RECORDED / file).is_file()
        command = "train" if "--eval_task" in jobs[0].flags else "distill"
        for job in {job.settings.get("arm", job.settings.get("uses")): job for job in jobs}.values():
            settings = parse(command, [*job.flags, "--output_dir", str(tmp_path / "run"), "--bf16", "false"])
            divided = job.settings.get("arm") == "k1-reward-divided"
            assert settings.training.scale_rewards == "group" or not divided
            if command == "train" and not divided:
                assert settings.training.scale_rewards == "none"


def test_batches_that_are_given_again():
    """24 batches in 40 updates: each once or twice, and never an older one."""
    again = exp_stale_distill.SomeAgain()
    given = [again.exchange(i) for i in range(40)]
    assert given[0] == 0
    assert len(set(given)) == 24
    assert max(map(given.count, given)) == 2
    assert all(0 <= i - batch <= 1 for i, batch in enumerate(given))
