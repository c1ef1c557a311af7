"""Two processes make the update that one makes on the same batch, baselines across processes included."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from tolerances import SAME_STEPS
from trainer import one_of_several

from klgrad.logs import examine

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "one_of_several.py"
CASES = {
    # Groups of eight over processes of four: every group lies in both.
    "leave-one-out": ["kl_baseline=leave_one_out", "num_generations=8", "loss_type=dr_grpo"],
    "cell": ["kl_cell=k3-loss"],
    "exact": ["kl_estimator=exact", "kl_baseline=leave_one_out", "kl_reduction=sequence"],
}
WATCHED = ["num_generations=8", "gradient_accumulation_steps=2"]


def run(output, processes, settings):
    """Start the processes and wait; the environment is what a launcher would set."""
    output.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if processes > 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(output), str(processes), tiny.folder(), *settings]
    started = []
    for rank in range(processes):
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        for process in started:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in started:
            process.kill()  # one that waits for another which has ended
    return torch.load(output / "end.pt", weights_only=True)


@pytest.mark.many
@pytest.mark.filterwarnings("ignore")  # a trainer warns of what a process of its own would only print
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case, tmp_path):
    (tmp_path / "1").mkdir()
    one_of_several.from_arguments(tmp_path / "1", 1, tiny.folder(), *CASES[case])  # this process is the one
    one = torch.load(tmp_path / "1" / "end.pt", weights_only=True)
    two = run(tmp_path / "2", 2, CASES[case])
    for name, value in one.items():
        SAME_STEPS.check(two[name], value)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which compiles")
def test_weights_that_deepspeed_spreads(monkeypatch, tmp_path):
    """ZeRO-3 holds a piece of the head on each process; the exact KL needs it whole."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    one = run(tmp_path / "one", 1, CASES["exact"])
    spread = run(tmp_path / "spread", 2, [*CASES["exact"], "zero3=1"])
    for name, value in spread.items():
        SAME_STEPS.check(value, one[name])


@pytest.mark.many
@pytest.mark.parametrize("kind", ["Stock", "Dropped"])
def test_the_callback_reports_on_the_completions_of_all_processes(kind, tmp_path):
    """Also where the loss leaves the KL out; all processes look at its gradient together."""
    one, two = (run(tmp_path / str(n), n, [f"stock={kind}", *WATCHED]) for n in (1, 2))
    for name, value in one.items():
        SAME_STEPS.check(two[name], value)
    assert float(one["moves"]) == (0 if kind == "Dropped" else -1)
    read = [examine(tmp_path / str(n) / "rollouts", by="step") for n in (1, 2)]
    assert read[0].rows == read[1].rows == 48
    for a, b in zip(read[0].parts, read[1].parts, strict=True):
        SAME_STEPS.check(*(x.kl.metrics()["kl/reverse/k3/per_token"] for x in (a, b)))


@pytest.mark.many
def test_the_callback_looks_at_the_gradient_when_all_processes_have_tokens(tmp_path):
    """A process that looks alone would wait for the others for ever."""
    found = run(tmp_path / "run", 2, ["stock=Masked", *WATCHED])
    assert float(found["moves"]) == 0
