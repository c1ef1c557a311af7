"""Tables of the pages: their rows have the cells of the heading, and the generated ones say what they leave out."""

import re
from dataclasses import asdict

import experiments
import pytest
import readme
import results
from docs.pages import PAGES, name_of

from klgrad.papers.runs import exceeds_over_seeds, undecided
from klgrad.papers.study import Check

CODE = re.compile(r"`[^`]*`")
BAR = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"\|[-:| ]+\|")


def uneven(text):
    """The rows whose number of bars differs from that of the rule below the heading."""
    bars, found = None, []
    for line in text.splitlines():
        if RULE.fullmatch(line):
            bars = line.count("|")
        elif not line.startswith("|"):
            bars = None
        elif bars is not None and len(BAR.findall(CODE.sub("", line))) != bars:
            found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_rows_of_a_table_have_the_cells_of_its_heading(page):
    """A bar in a formula would end a cell."""
    assert not uneven(page.read_text(encoding="utf-8"))


def test_a_bar_in_a_cell_is_found():
    table = "| a | b |\n|---|---|\n| 1 | {} |\n"
    assert not uneven(table.format(r"\|l\| and `x|y`"))
    assert uneven(table.format("|l|"))


# Generated ones, from made-up numbers.


def test_sentences_without_runs_are_one_line():
    holds = exceeds_over_seeds("it holds", {"mean": 1.0, "error": 0.1, "seeds": 3})
    too_few = exceeds_over_seeds("it has two seeds", {"mean": 1.0, "error": 0.1, "seeds": 2})
    table = experiments.checks_table
    checks = [holds, undecided("a"), too_few, undecided("b", "measurements")]
    lines = table(checks).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| it holds", "| it has two seeds"]
    assert lines[3].endswith("| undecided |  |")
    assert lines[4:] == ["", "2 more sentences wait for runs."]
    assert table([holds, undecided("a")]).endswith("|\n\n1 more sentence waits for runs.\n")
    assert table([undecided("a"), undecided("b")]) == "2 sentences wait for runs.\n"
    assert table([holds]).count("\n") == 3


def test_a_column_with_one_value_is_a_line_below_the_table():
    table = experiments.lean_table
    rows = [("a", "3", "1", "0"), ("b", "3", "2", "0")]
    assert table(("arm", "seeds", "KL", "stopped"), rows).splitlines() == [
        *("| arm | KL |", "|---|---|", "| a | 1 |", "| b | 2 |"),
        *("", "In every row: seeds 3; stopped 0."),
    ]
    assert "every" not in table(("arm", "KL"), [("a", "1"), ("b", "2")])


def test_the_table_of_weights_has_the_seeds_of_few_runs(monkeypatch):
    columns = ("correct_in", "equal_kl", "correct_out", "kl_per_sequence", "entropy_per_token")
    none = {column: {"mean": None, "error": None, "seeds": 0} for column in columns}
    few = none | {"equal_kl": {"mean": 1.0, "error": 0.1, "seeds": 2}}
    found = {"weighted": {"10": {"k1-prefix-bounded": none}, "2": {"k1-prefix-bounded": few}}}
    monkeypatch.setattr(experiments, "_numbers", lambda _: found)
    lines = experiments.weighted().splitlines()
    assert [line.split(" | ")[4] for line in lines[2:]] == ["no value", "+1.000 ± 0.1 (2 seeds)"]
    assert {line.count("|") for line in lines} == {9}


def test_a_long_verdict_counts_the_sentences_that_decide_it():
    """Those of the paper; all of them if none is from a paper."""
    checks = [Check("a", "1", holds=False), Check("b", "1", holds=True), Check("c", "1", holds=False, ours=True)]
    saved = lambda checks: {"result": "x", "verdict": "y" * 999, "checks": [asdict(check) for check in checks]}
    short = results._short
    assert short(saved(checks)) == "holds 1, contradicted 1, of 2 sentences"
    assert short(saved(checks[2:])) == "contradicted 1, of 1 sentences"


def test_verdicts_are_counted_by_source_as_the_results_page_says(monkeypatch, tmp_path):
    """Sentences of a paper and ours apart; two studies of one paper together."""
    marks = ("✓ a: 1", "? b: 1", "✗ (ours) c: 1", "? (ours) d: 1")
    section = "".join(f"- {mark}\n" for mark in marks)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tang-munos.md").write_text(
        f"# Page\n\n## tang-munos/fig1\n{section}\n## tang-munos/fig2\n- ✓ e: 1\n\n## tang-munos/fig3\n- ✗ f: 1\n"
    )
    table = "| [klgrad/division](page.md) | claim | holds 2, undecided 1, of 3 sentences |\n"
    (tmp_path / "results.md").write_text(table)
    monkeypatch.setattr(results, "DOCS", tmp_path)
    names = {"tang-munos/fig1": "A", "tang-munos/fig2": "A", "tang-munos/fig3": "B", "klgrad/division": "C"}
    assert results._counted("source", names).splitlines()[2:] == [
        "| A | 2 | 0 | 1 | 0 | 1 | 1 |",
        "| B | 0 | 1 | 0 | 0 | 0 | 0 |",
        "| C | 2 | 0 | 1 | 0 | 0 | 0 |",
    ]


def test_time_between_kernels_is_in_no_sum(monkeypatch):
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
    row = {"candidate": "a", "hidden": "64", "vocabulary": "9", "median_ms": "1", "times_floor": "", "floor": ""}
    row |= {"gpu": "G", "torch": "2", "triton": "3", "rounds": "5", "commit": "abc", "date": "today", "library": "l 1"}
    monkeypatch.setattr(readme, "_rows", lambda _: [row, {**row, "commit": "old", "date": "before", "library": "l 2"}])
    lines = readme._timings("exact", "title").splitlines()
    assert lines[2] == "| a | 1 ms |  |  |"
    assert lines[3] == "| a: l 2, 5 rounds, commit old, before | 1 ms |  |  |"
    assert lines[-1] == "*G, torch 2, Triton 3, 5 rounds, commit abc, today; l 1; l 2*"
