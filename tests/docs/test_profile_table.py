"""The table of the kernels' profile: sums of kernels, beside the measured step."""

import importlib
import sys

from docs.pages import ROOT


def test_time_between_kernels_is_in_no_sum(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    readme = importlib.import_module("readme")
    names = ("4 projections", "klgrad lean", "klgrad fast")
    spent = {"matrix products": "10.0", "the rest": "2.0", readme.BETWEEN_KERNELS: "5.0"}
    made = {
        "kernels_profile": [
            {"candidate": name, "hidden": "64", "kernels": kind, "ms": ms}
            for name in names
            for kind, ms in spent.items()
        ],
        "kernels_exact": [{"candidate": name, "hidden": "64", "median_ms": "18.5"} for name in names],
    }
    monkeypatch.setattr(readme, "_rows", made.__getitem__)
    lines = readme.profile().splitlines()
    assert "| klgrad fast | all kernels | 12.00 ms |" in lines
    assert "| klgrad fast | between kernels | 5.00 ms |" in lines
    assert "| klgrad fast | a step of the table above | 18.50 ms |" in lines
    assert "| 4 projections | matrix products | 10.00 ms |" not in lines


def test_a_row_of_another_run_says_of_which(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    readme = importlib.import_module("readme")
    row = {"candidate": "a", "hidden": "64", "vocabulary": "9", "median_ms": "1", "times_floor": "", "floor": ""}
    row |= {"gpu": "G", "torch": "2", "triton": "3", "rounds": "5", "commit": "abc", "date": "today", "library": "l 1"}
    monkeypatch.setattr(readme, "_rows", lambda _: [row, {**row, "commit": "old", "date": "before", "library": "l 2"}])
    lines = readme._timings("exact", "title").splitlines()
    assert lines[2] == "| a | 1 ms |  |  |"
    assert lines[3] == "| a: l 2, 5 rounds, commit old, before | 1 ms |  |  |"
    assert lines[-1] == "*G, torch 2, Triton 3, 5 rounds, commit abc, today; l 1; l 2*"
