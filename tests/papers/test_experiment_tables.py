"""The generated tables of experiments, from made-up runs: every arm has its row, and what is missing stays empty."""

import experiments
import pytest
from papers.made_up_runs import write
from papers.test_discount import runs, written
from papers.test_long_runs import ENDS, changed, made
from papers.test_reuse import files
from reference.text import table

from klgrad.papers.own import discount, reuse
from klgrad.papers.tang_munos import long_runs

SOME = ("k3-loss", "k1-reward", "none")


@pytest.fixture
def tables(monkeypatch):
    """The module of the tables, which reads the numbers of a study with these settings."""

    def reading(study, settings):
        numbers = study.run(settings)
        monkeypatch.setattr(experiments, "_numbers", lambda _: numbers)
        monkeypatch.setattr(experiments, "lean_table", table)  # every column
        return experiments

    return reading


def cells(table):
    """The cells of a table by row, without its head; all rows have as many as the head."""
    rows = [line for line in table.strip().splitlines() if line.startswith("|")]
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]
    assert {len(line) for line in lines} == {len(head)}
    return lines


def test_long_runs(tables, tmp_path):
    some = made(left_out={*ENDS} - {*SOME})
    module = tables(long_runs, write(tmp_path, long=changed(some, "none", (300,), correct_in=0.2)))
    rows = cells(module.long_runs())
    assert [(row[0], row[1]) for row in rows] == [(f"`{arm}`", str(update)) for arm in SOME for update in (60, 300)]
    assert [row[9] for row in rows] == ["0", "0", "0", "0", "3", "3"]
    assert rows[1][4].startswith("**+0.111 ±")
    assert rows[1][3].startswith("2 ± ")
    pairs = {row[0]: row[1:] for row in cells(module.long_pairs())}
    assert len(pairs) == 13
    assert set(pairs["`k3-loss` less `k2-loss`"]) == {""}
    assert pairs["`k3-loss` less `k1-reward`"][3].startswith("**-2.000 ±")


def by_arm(table):
    """The cells of a table by the first two: trainer, and uses x completions of a batch; or completions and arm."""
    return {tuple(row[:2]): row[2:] for row in cells(table)}


def test_reuse(tables, tmp_path):
    rows = files(seeds=(0, 1, 2))
    for row in rows["reuse_trl"]:
        row["seconds"] = ""
    module = tables(reuse, write(tmp_path, **rows))
    ends, sweep = by_arm(module.reuse()), by_arm(module.reuse_sweep())
    assert ends["`klgrad`", "4 x 256"][:3] == ["0.0006 cosine", "64 ± 0", "2"]
    assert ends["`klgrad`", "4 x 256"][-1].startswith("19.1 ± ")
    assert ends["`trl-jsd`", "1 x 256"][1] == ""
    assert sweep["`klgrad`", "4 x 256"] == ["0.764", "**0.588**"]
    assert sweep["`klgrad`", "1 x 64"] == ["0.917", "**0.706**"]


def test_arms_of_reuse_are_in_order(tables, tmp_path):
    """Our trainer first, then larger batches, then fewer uses."""
    rows = {name: list(reversed(found)) for name, found in files().items()}
    module = tables(reuse, write(tmp_path, **rows))
    sizes = (("256", "1248"), ("64", "12"), ("32", "1"))
    ours = [("`klgrad`", f"{uses} x {size}") for size, some in sizes for uses in some]
    theirs = [(f"`trl-{kind}`", "1 x 256") for kind in ("forward", "jsd", "reverse")]
    in_order = [*ours, *theirs, ("`trl-reverse`", "1 x 64")]
    assert list(by_arm(module.reuse())) == list(by_arm(module.reuse_sweep())) == in_order


def test_settings_that_were_not_run_say_so_and_one_seed_has_no_error_over_seeds(tables, tmp_path):
    """An arm with the first seed alone is in the sweep alone."""
    rows = files(seeds=(0, 2))
    rows["reuse_trl"] = [row for row in rows["reuse_trl"] if row["schedule"] == "cosine"]
    rows["reuse_seeds"] = [row for row in rows["reuse_seeds"] if row["uses"] != 8]
    module = tables(reuse, write(tmp_path, **rows))
    ends, sweep = by_arm(module.reuse()), by_arm(module.reuse_sweep())
    assert sweep["`trl-jsd`", "1 x 256"] == ["no run", "**0.882**"]
    assert ends["`klgrad`", "1 x 256"][3:5] == ["0.8 ± 0.005", "1.6"]
    assert set(sweep) - set(ends) == {("`klgrad`", "8 x 256")}


def test_the_discount_at_the_best_rates_and_at_one_rate(tables, tmp_path):
    """Runs at one rate have the first seed, and are of the larger batch alone."""
    at_one = [row for row in runs(rate="1e-4", seeds=2, first=0) if row["completions"] == 256]
    module = tables(discount, written(tmp_path, discount=[*at_one, *runs()]))
    best, one = by_arm(module.discount()), by_arm(module.discount_one_rate())
    assert best["256", "`exact-0`"][:3] == ["0.0003", "3", "1 ± 0.0058"]
    assert {row[0] for row in best.values()} == {"0.0003"}
    assert one["256", "`exact-0`"][:3] == ["0.0001", "2", "0.995 ± 0.0071"]
    assert set(one) == {arm for arm in best if arm[0] == "256"}
    assert list(best)[: len(one)] == list(one), "the larger batch comes first"


def test_the_best_rate_of_an_arm_is_beside_all_its_rates(tables, tmp_path):
    found = by_arm(tables(discount, written(tmp_path)).discount_rates())
    assert next(iter(found)) == ("256", "`exact-0`")
    assert found["64", "`exact-0`"] == ["0.800 ± 0.01", "0.1", "3", "1.000, 4", "**0.800, 5**", "no run"]
