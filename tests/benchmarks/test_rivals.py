"""The rivals of the kernel benchmark: each is compared with the matrix products that it needs."""

import csv
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROJECTIONS = {
    "exact": {
        "klgrad lean": 6,
        "klgrad fast": 4,
        "klgrad, 0.75 GiB": 6,
        "klgrad lean, inputs checked": 6,
        "klgrad lean, kernels of other GPUs": 6,
        "klgrad fast, kernels of other GPUs": 4,
        "klgrad, 0.75 GiB, kernels of other GPUs": 6,
        "TRL ChunkedDivergence (KL alone)": 6,
        "Liger fused linear JSD (mean KL alone)": 4,
        "torch, full logits (KL alone)": 4,
    },
    "sampled": {
        "klgrad lean": 4,
        "klgrad fast": 3,
        "QuACK linear cross-entropy (sum alone)": 3,
        "TRL ChunkedLogProb": 4,
        "Liger fused linear cross-entropy": 4,
        "Liger fused linear cross-entropy, dispatched": 4,
        "Liger fused linear scaled cross-entropy": 4,
        "cut-cross-entropy": 4,
        "cut-cross-entropy, no filter": 4,
        "verl FusedLinearForPPO": 4,
        "verl LinearCrossEntropy (Triton)": 4,
        "torch, full logits": 3,
    },
}
"""In the forward and backward pass of the exact KL, and of the log-prob alone; by reading their source."""


@pytest.fixture
def bench():
    pytest.importorskip("triton")
    return importlib.import_module("bench_kernels")


def candidates(bench, part):
    case = bench.Case(8, 4, 16)
    if part == "exact":
        return bench.rivals.exact(case.h, case.w, case.h_ref, case.w_ref, case.up[0])
    return bench.rivals.sampled(case.h, case.w, case.y, case.up[0])


@pytest.mark.parametrize("part", PROJECTIONS)
def test_every_candidate_has_the_floor_of_its_products(bench, part):
    names = PROJECTIONS[part]
    assert {name for name in names if not name.startswith("klgrad")} == set(candidates(bench, part))
    fewer, more = (f"{count} projections" for count in sorted({*names.values()}))
    floors = bench.floor_of(dict.fromkeys([fewer, more, *names]), (fewer, more), fewer, more)
    assert floors == {name: f"{count} projections" for name, count in names.items()}


@pytest.mark.parametrize("part", PROJECTIONS)
def test_the_recorded_ratios_are_to_those_floors(part):
    with (BENCHMARKS / "results" / f"kernels_{part}.csv").open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    median = {(r["hidden"], r["candidate"], r["commit"]): r["median_ms"] for r in rows}
    for row in (row for row in rows if row["floor"]):
        assert row["floor"] == f"{PROJECTIONS[part][row['candidate']]} projections", row["candidate"]
        below = median.get((row["hidden"], row["floor"], row["commit"]))
        if row["median_ms"] and below:  # the floor of an older row may not be recorded
            ratio = float(row["median_ms"]) / float(below)
            assert abs(float(row["times_floor"]) - ratio) < 2e-3 * ratio, row


@pytest.mark.parametrize("part", PROJECTIONS)
def test_inputs_are_checked_in_one_candidate_of_ours(bench, part, monkeypatch):
    """No rival checks them."""
    checked, statistics = {}, bench.token_statistics

    def once(candidates, rounds):
        for name, step in candidates.items():
            monkeypatch.setattr(
                bench, "token_statistics",
                lambda *x, name=name, **how: checked.update({name: how.get("validate", True)}) or statistics(*x, **how),
            )  # fmt: skip
            if name.startswith("klgrad"):
                step()
        return {name: bench.Measured([1.0, 1.0]) for name in candidates}

    monkeypatch.setattr(bench, "in_turn", once)
    bench.PARTS[part](8, 4, 16, 1, None)
    ours = {name for name in PROJECTIONS[part] if name.startswith("klgrad")}
    elsewhere = {name for name in ours if bench.ELSEWHERE in name}
    assert checked == {name: name.endswith("checked") for name in ours - (elsewhere - set(checked))}


def test_the_rival_that_would_check_its_targets_is_told_not_to(bench):
    package = pytest.importorskip("liger_kernel").__path__[0]
    source = (Path(package) / "ops" / "cutedsl" / "ops" / "fused_scaled_cross_entropy_sm90.py").read_text("utf-8")
    assert f'VALIDATE_TARGETS_ENV = "{bench.rivals.CHECK}"' in source
    assert os.environ[bench.rivals.CHECK] == "0"


def test_the_gpu_sleeps_before_the_timed_region(bench, monkeypatch):
    """So that the CPU is ahead of it when the time begins."""
    gpu, order = importlib.import_module("gpu"), []
    event = SimpleNamespace(record=lambda: order.append("time"), elapsed_time=lambda end: 3.0)
    timed = lambda *, enable_timing: {True: event}[enable_timing]
    cuda = {"is_available": lambda: True, "Event": timed, "reset_peak_memory_stats": lambda: None}
    cuda |= {"synchronize": lambda: order.append("wait"), "_sleep": lambda cycles: order.append(cycles)}
    cuda |= {"memory_allocated": lambda: 1, "max_memory_allocated": lambda: 5}
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert gpu._once(lambda: order.append("step")) == (3.0, 4)
    assert order == ["wait", gpu.HEAD_START, "time", "step", "time", "wait"]
    assert 2e6 < gpu.HEAD_START < 4e7  # 1 to 20 ms at 2 GHz


def test_rivals_are_chosen_by_the_beginnings_of_their_names(bench):
    sampled = candidates(bench, "sampled")
    assert bench.chosen(sampled, None) == sampled
    assert set(bench.chosen(sampled, ["QuACK", "Liger fused linear scaled"])) == {
        "QuACK linear cross-entropy (sum alone)",
        "Liger fused linear scaled cross-entropy",
    }


def test_a_run_of_some_rivals_or_shapes_keeps_the_other_rows(bench, monkeypatch, tmp_path):
    """A new row replaces its earlier one in place; a run of everything replaces the file."""
    row = lambda candidate, hidden, ms: {
        "benchmark": "exact KL", "candidate": candidate, "tokens": 64, "hidden": hidden, "vocabulary": 512,
        "median_ms": ms, "p20_ms": ms, "p80_ms": ms, "times_floor": "", "extra_gib": "", "library": "",
    }  # fmt: skip
    file = tmp_path / "kernels_exact.csv"
    bench.write([row("4 projections", 4096, 1), row("Liger", 4096, 2), row("Liger", 2048, 3)], file)
    monkeypatch.setattr(bench, "measured", lambda *_: iter([[row("Liger", 4096, 9)], [row("QuACK", 4096, 8)]]))
    rows = lambda: [(r["candidate"], r["hidden"], r["median_ms"]) for r in bench.read(file)]
    kept = [("4 projections", "4096", "1"), ("Liger", "2048", "3")]
    new = [("Liger", "4096", "9"), ("QuACK", "4096", "8")]
    merged = [kept[0], new[0], kept[1], new[1]]
    for flags, expected in ((["--rivals", "Liger", "QuACK"], merged), (["--hidden", "4096"], merged), ([], new)):
        monkeypatch.setattr(sys, "argv", ["bench", "--only", "exact", "--out", str(tmp_path), *flags])
        bench.main()
        assert rows() == expected


def test_a_row_says_which_kernels_liger_chose(bench, monkeypatch):
    pytest.importorskip("liger_kernel")
    library = bench.rivals.library
    assert library("Liger fused linear cross-entropy").endswith(", Triton")
    for hopper, kernels in ((False, "torch"), (True, "CuTe")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda hopper=hopper: hopper)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        assert library("Liger fused linear scaled cross-entropy").endswith(f", {kernels}")
    assert library("4 projections") == ""


def test_a_profile_names_what_each_kernel_does(bench):
    profile = importlib.import_module("profile_kernels")
    kind_of = profile.kind_of
    from klgrad.kernels import tiles_triton
    from klgrad.kernels.hopper import gluon as gradient, gluon as merge, gluon as sums

    ours = (sums.sums_kernel, gradient.gradient_kernel, merge._merge_kernel)
    ours += (tiles_triton._statistics_kernel, tiles_triton._gradient_kernel)
    assert len({kind_of(kernel.fn.__name__) for kernel in ours} - {"matrix products", "the rest"}) == len(ours)
    assert kind_of("nvjet_tst_128x256") == kind_of("sm90_xmma_gemm_bf16") == "matrix products"
    assert kind_of("vectorized_elementwise") == "the rest"
    found = profile.by_kind([("nvjet", 2.0), ("gemm", 1.0), ("sums_kernel", 4.0)], 7.5)
    assert found == {"matrix products": 3.0, kind_of("sums_kernel"): 4.0, "between kernels": 0.5}


@pytest.mark.slow
def test_the_time_of_our_own_code_is_that_of_functions_that_exist():
    trainers, kl_trainer = map(importlib.import_module, ("trainers", "klgrad.trl.kl_trainer"))

    clock, before = trainers.Clock(), kl_trainer.gather_rows
    with trainers.own_time(clock):
        assert kl_trainer.gather_rows is not before
    assert kl_trainer.gather_rows is before
