"""docs/audit.md states numbers of the problems: they are held against the problems themselves."""

import re
from pathlib import Path

from klgrad import KLTerm
from klgrad.audit import audit
from klgrad.audit.gradients import RARE, SHARP, limit_cases
from klgrad.audit.problems import LONG, MANY, WIDE, cases, group_sizes, in_words
from klgrad.audit.render.page import to_html
from klgrad.audit.render.terminal import CAPTION
from klgrad.targets import TARGETS

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def row(case, taken):
    space, log_ratio = case.problem.space, case.problem.logp - case.problem.ref_logp
    lengths = f"1 to {space.length}" if case.varying else f"{space.length}"
    cells = [case.wider or case.distance, space.vocab, lengths, case.group_size, len(space) ** case.group_size]
    cells += [f"{float(log_ratio.min()):.1f} to {float(log_ratio.max()):.1f}", taken]
    return "| " + " | ".join(map(str, cells)) + " |"


def table():
    everything, equal = cases(on_policy=False), cases(on_policy=False, lengths="equal")
    names = {case.name for case in everything}
    rows = [row(case, "always" if not case.varying else "`--lengths all`") for case in everything]
    rows += [row(case, "`--lengths equal`") for case in equal if case.name not in names]
    return "\n".join(rows)


def test_the_table_of_problems_is_theirs():
    assert table() in PAGE, f"docs/audit.md should have these rows:\n{table()}"


def test_the_numbers_in_the_text_are_theirs():
    problems = cases(on_policy=False)
    standard = [case for case in problems if not case.wider]
    assert f"It has {len(problems)} small problems" in TEXT
    assert f"{len(standard)} *standard* problems and {len(problems) - len(standard)} *wider* ones" in TEXT
    assert f"every group* of {group_sizes()} completions" in TEXT
    assert f"more than {LONG} tokens" in TEXT
    assert f"beyond ±{WIDE:g}" in TEXT
    assert f"more than {MANY} rows" in TEXT
    limit = limit_cases(on_policy=False)
    assert f"more than {max(case.problem.space.vocab for case in (*problems, *limit))} tokens" in TEXT
    assert f"on {len(limit)} more problems all probabilities" in TEXT
    assert {case.parts for case in limit} == {2, 3, 4, SHARP, RARE} == {2, 3, 4, 8, 24}
    assert "multiples of 1/2, 1/3, 1/4, 1/8 or 1/24" in TEXT
    assert f"{max(c.group_size for c in standard)} rows" in TEXT


def test_the_table_of_targets_is_theirs():
    for name, target in TARGETS.items():
        in_text = name in ("unknown", "sum-of-targets") or target.climbed
        assert in_text or f"| `{name}` | {target.formula} |" in PAGE, name


def test_every_field_of_a_result_is_explained():
    explained = set(re.findall(r"`(\w+)`", PAGE.split("## What it reports")[1].split("## Your own loss")[0]))
    result = audit(KLTerm())
    fields = {field.removesuffix("_off_policy") for field in result.to_dict()}
    assert fields - explained == {"name", "kind", "verdict_by_problem"}


def test_the_ratios_in_the_text_are_theirs():
    """Of a token, between the policy and the sampler, off-policy."""
    reached = re.search(r"π/μ of a token from ([\d.]+) to ([\d.]+)", TEXT)
    assert reached, "docs/audit.md should state the range of π/μ"
    ratios = [(c.problem.logp - c.problem.behavior_logp).exp() for c in cases(on_policy=False)]
    low, high = min(float(r.min()) for r in ratios), max(float(r.max()) for r in ratios)
    assert reached.groups() == (f"{low:.3f}", f"{high:.0f}")


def test_the_table_in_a_terminal_and_the_page_say_what_is_summed():
    assert in_words() == f"every group of {group_sizes()} completions of {len(cases(on_policy=False))} small problems"
    assert in_words() in CAPTION
    assert in_words() in to_html([], [])
