"""The page of the kernels and their benchmark agree with the code."""

import re
from pathlib import Path

from klgrad.kernels import head, state, tiling

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
BENCHMARK = (ROOT / "benchmarks" / "bench_kernels.py").read_text(encoding="utf-8")


def test_the_usage_line_names_the_options_that_there_are():
    usage = BENCHMARK.split('"""')[1]
    assert set(re.findall(r"\[(--\w+)", usage)) == set(re.findall(r'add_argument\("(--\w+)"', BENCHMARK))


def test_the_page_names_the_number_of_rounds():
    """That of the other tables stands below each."""
    linear = re.search(r"^LINEAR_ROUNDS = (\d+)$", BENCHMARK, re.MULTILINE)[1]
    assert f"and {linear} in the table by number of tokens" in PAGE


def test_the_page_names_the_number_of_sums():
    maxima = [name for name in state.State._fields if name.endswith("top")]
    assert (len(maxima), state.FIELDS - len(maxima)) == (2, 9)
    assert "11 numbers per token and slice: two maxima and nine sums" in PAGE
    assert state.FIELDS == len(state.State._fields) == 11


def test_the_page_names_tile_and_budget():
    assert f"({tiling.STRIP} tokens x {tiling.WIDTH} entries)" in PAGE
    assert f"has {tiling.LEAN_BUDGET >> 30} GiB" in PAGE


def test_the_page_names_a_refused_family():
    assert "chameleon" in head.REFUSED
    assert "Chameleon" in PAGE
