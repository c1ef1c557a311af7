"""docs/audit.md states numbers of the probes and problems: they are held against these."""

import re
from pathlib import Path

from klgrad import KLTerm
from klgrad.audit import audit
from klgrad.audit.anatomy import VOCABULARY
from klgrad.audit.batch import proof_cases
from klgrad.audit.probes import REACH
from klgrad.targets import TARGETS

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def test_the_numbers_in_the_text_are_theirs():
    problems = proof_cases(False)
    assert f"every outcome of {len(problems)} small problems" in TEXT
    assert f"log-ratios from -{REACH:g} to {REACH:g}" in TEXT
    assert f"a vocabulary of {VOCABULARY}" in TEXT


def test_the_table_of_targets_is_theirs():
    for name, target in TARGETS.items():
        in_text = name in ("unknown", "sum-of-targets") or target.climbed
        assert in_text or f"| `{name}` | {target.formula} |" in PAGE, name


def test_every_field_of_a_result_is_explained():
    explained = set(re.findall(r"`(\w+)`", PAGE.split("## What it reports")[1].split("## Your own loss")[0]))
    result = audit(KLTerm())
    fields = {field.removesuffix("_off_policy") for field in result.to_dict()}
    assert fields - explained == set()
