"""The generated tables of experiments, from made-up runs: every arm has its row, and what is missing stays empty."""

import importlib
import sys
from pathlib import Path

import pytest
from papers.made_up_rl_runs import write as write_one
from papers.made_up_runs import write
from papers.test_discount import runs, swept
from papers.test_long_runs import changed, made
from papers.test_reuse import files

from klgrad.papers import Settings
from klgrad.papers.own import discount, reuse
from klgrad.papers.tang_munos import long_runs

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def tables(monkeypatch):
    """The module of the tables, which reads the numbers it is given."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    module = importlib.import_module("experiments")

    def reading(numbers):
        monkeypatch.setattr(module, "_numbers", lambda _: numbers)
        return module

    return reading


def cells(table):
    """The cells of a table by row, without its head; all rows have as many as the head."""
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    assert {len(line) for line in lines} == {len(head)}
    return lines


def test_long_runs(tables, tmp_path):
    write_one(
        tmp_path / "long.csv", changed(made(left_out=("k2-loss", "k1-reward-near")), "none", (300,), correct_in=0.2)
    )
    module = tables(long_runs.run(Settings(measured=str(tmp_path))))
    rows = cells(module.long_runs())
    assert [(row[0], row[1]) for row in rows] == [
        (f"`{arm}`", str(update)) for arm in ("k3-loss", "k1-reward", "none") for update in (60, 300)
    ]
    assert [row[9] for row in rows] == ["", "0", "", "0", "", "3"]
    assert rows[1][4].startswith("**+0.111 ±")
    assert rows[1][3].startswith("2 ± ")
    pairs = {row[0]: row[1:] for row in cells(module.long_pairs())}
    assert len(pairs) == 7
    assert set(pairs["`k3-loss` less `k2-loss`"]) == {""}
    assert pairs["`k3-loss` less `k1-reward`"][3].startswith("**-2.000 ±")


def test_reuse(tables, tmp_path):
    rows = files(seeds=(0, 1))
    for row in rows["reuse_trl"]:
        row["seconds"] = ""
    module = tables(reuse.run(write(tmp_path, **rows)))
    ends = {(row[0], row[1]): row[2:] for row in cells(module.reuse())}
    assert len(ends) == 7
    assert ends["`klgrad`", "4"][:4] == ["0.0006", "cosine", "64 ± 0", "2"]
    assert ends["`klgrad`", "4"][-1].startswith("19.1 ± ")
    assert ends["`trl-jsd`", "1"][2] == ""
    sweep = {(row[0], row[1]): row[2:] for row in cells(module.reuse_sweep())}
    assert sweep["`klgrad`", "4"] == ["0.772", "**0.594**"]


def test_settings_that_were_not_run_say_so_and_one_seed_has_no_error_over_seeds(tables, tmp_path):
    rows = files(seeds=(0,))
    rows["reuse_trl"] = [row for row in rows["reuse_trl"] if row["schedule"] == "cosine"]
    module = tables(reuse.run(write(tmp_path, **rows)))
    sweep = {(row[0], row[1]): row[2:] for row in cells(module.reuse_sweep())}
    assert sweep["`trl-jsd`", "1"] == ["no run", "**0.891**"]
    ends = {(row[0], row[1]): row[2:] for row in cells(module.reuse())}
    assert ends["`klgrad`", "1"][4:6] == ["0.792 ± 0.005", "1.58"]


def test_the_best_rate_of_an_arm_is_beside_all_its_rates(tables, tmp_path):
    module = tables(discount.run(write(tmp_path, discount=runs(), discount_sweep=swept())))
    found = {(row[0], row[1]): row[2:] for row in cells(module.discount_rates())}
    assert next(iter(found)) == ("256", "`exact-0`")
    assert found["64", "`exact-0`"] == ["3e-4", "0.800 ± 0.01", "5", "0.1", "3", "1.000, 4", "0.800, 5", "no run"]
