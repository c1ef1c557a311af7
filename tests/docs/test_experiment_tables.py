"""The generated tables of the experiments, from made-up numbers: what they leave out, and what they say instead."""

import importlib
import sys
from dataclasses import asdict

import pytest
from docs.pages import ROOT

from klgrad.papers.runs import exceeds_over_seeds, undecided_without, undecided_without_runs
from klgrad.papers.study import Check

HOLDS = exceeds_over_seeds("it holds", {"difference": 1.0, "error": 0.1, "seeds": 3})
TOO_FEW = exceeds_over_seeds("it has two seeds", {"difference": 1.0, "error": 0.1, "seeds": 2})


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return importlib.import_module


def test_sentences_without_runs_are_one_line(script):
    table = script("experiments").checks_table
    checks = [HOLDS, undecided_without_runs("a"), TOO_FEW, undecided_without("measurements", "b")]
    lines = table(checks).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| it holds", "| it has two seeds"]
    assert lines[3].endswith("| undecided |  |")
    assert lines[4:] == ["", "2 more sentences wait for runs."]
    assert table([HOLDS, undecided_without_runs("a")]).endswith("|\n\n1 more sentence waits for runs.\n")
    assert table([undecided_without_runs("a"), undecided_without_runs("b")]) == "2 sentences wait for runs.\n"
    assert table([HOLDS]).count("\n") == 3


def test_a_column_with_one_value_is_a_line_below_the_table(script):
    table = script("experiments").lean_table
    rows = [("a", "3", "1", "0"), ("b", "3", "2", "0")]
    assert table(("arm", "seeds", "KL", "stopped"), rows).splitlines() == [
        *("| arm | KL |", "|---|---|", "| a | 1 |", "| b | 2 |"),
        *("", "In every row: seeds 3; stopped 0."),
    ]
    assert "every" not in table(("arm", "KL"), [("a", "1"), ("b", "2")])


def test_gradients_that_were_not_measured(script, monkeypatch):
    experiments = script("experiments")
    monkeypatch.setattr(experiments, "_numbers", lambda _: {"gradients": {}})
    assert experiments.gradients() == "Not measured yet.\n"


def test_the_table_of_weights_names_what_they_are_compared_with(script, monkeypatch):
    experiments = script("experiments")
    columns = ("correct_in", "equal_kl", "correct_out", "kl_per_sequence", "entropy_per_token")
    arms = {"k1-prefix-bounded": dict.fromkeys(columns)}
    few = {
        "k1-prefix-bounded": {**arms["k1-prefix-bounded"], "equal_kl": {"difference": 1.0, "error": 0.1, "seeds": 2}}
    }
    found = {"weighted": {"10": arms, "2": few}, "compared_with": {"10": "k1-unweighted", "2": "k1-reward"}}
    monkeypatch.setattr(experiments, "_numbers", lambda _: found)
    lines = experiments.weighted().splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| 10", "`k1-prefix-bounded`", "`k1-unweighted`"],
        ["| 2", "`k1-prefix-bounded`", "`k1-reward`"],
    ]
    assert [line.split(" | ")[4] for line in lines[2:]] == ["no value", "+1.000 ± 0.1 (2 seeds)"]
    assert {line.count("|") for line in lines} == {9}


def test_a_long_verdict_counts_the_sentences_that_decide_it(script):
    """Those of the paper; all of them if none is from a paper."""
    checks = [Check("a", "1", holds=False), Check("b", "1", holds=True), Check("c", "1", holds=False, ours=True)]
    saved = lambda checks: {"result": "x", "verdict": "y" * 999, "checks": [asdict(check) for check in checks]}
    short = script("results")._short
    assert short(saved(checks)) == "holds 1, contradicted 1, of 2 sentences"
    assert short(saved(checks[2:])) == "contradicted 1, of 1 sentences"


def test_verdicts_are_counted_by_source_as_the_results_page_says(script, monkeypatch, tmp_path):
    """Sentences of a paper and ours apart; two studies of one paper together."""
    marks = ("✓ a: 1", "? b: 1", "✗ (ours) c: 1", "? (ours) d: 1")
    section = "".join(f"- {mark}\n" for mark in marks)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tang-munos.md").write_text(
        f"# Page\n\n## tang-munos/fig1\n{section}\n## tang-munos/fig2\n- ✓ e: 1\n\n## tang-munos/fig3\n- ✗ f: 1\n"
    )
    table = "| [klgrad/division](page.md) | claim | holds 2, undecided 1, of 3 sentences |\n"
    (tmp_path / "results.md").write_text(table)
    results = script("results")
    monkeypatch.setattr(results, "DOCS", tmp_path)
    names = {"tang-munos/fig1": "A", "tang-munos/fig2": "A", "tang-munos/fig3": "B", "klgrad/division": "C"}
    assert results._counted("source", names).splitlines()[2:] == [
        "| A | 2 | 0 | 1 | 0 | 1 | 1 |",
        "| B | 0 | 1 | 0 | 0 | 0 | 0 |",
        "| C | 2 | 0 | 1 | 0 | 0 | 0 |",
    ]
