"""The jobs of the experiments in `benchmarks` have settings that the commands accept."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from klgrad.training.settings.parse import parse

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COMMANDS = {
    "exp_std": "train",
    "exp_comedy": "train",
    "exp_async": "train",
    "exp_frontier": "train",
    "exp_stale_distill": "distill",
    "exp_reuse": "distill",
    "exp_rethinking": "train",
    "exp_long": "train",
    "exp_discount": "distill",
}


@pytest.mark.filterwarnings("ignore::klgrad.trl.MeaningWarning")  # some arms are unsound on purpose
@pytest.mark.parametrize("name", COMMANDS)
def test_every_job_is_accepted(name, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    jobs = importlib.import_module(name).jobs(argparse.Namespace(model=tmp_path, runs=tmp_path))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        if job.settings["seed"] == 0:
            parse(
                COMMANDS[name], [*job.flags, "--output_dir", str(tmp_path / "run"), "--bf16", "false"]
            )  # raises otherwise
