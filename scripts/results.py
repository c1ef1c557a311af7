"""Write docs/results.md and its figures from the numbers of `klgrad reproduce --out DIR`: `results.py DIR`."""

import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from klgrad.papers.all_studies import studies
from klgrad.papers.study import Check
from klgrad.papers.study_runner import Outcome
from klgrad.support.figure_files import KINDS

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images" / "reproduce"
LONGEST_VERDICT = 300
"""Characters of a verdict in the table."""

HEAD = """# Reproduced results

`make results` (`klgrad reproduce`, seed {seed}) writes this page: every number in a verdict or a check was measured in
that run. Sentences marked *(ours)* are not from the paper, and the verdict on its claim does not depend on them.
Statistical sentences are checked by their z-score over repeats (more than 4 standard errors), the others by the limit
or tolerance shown. `klgrad reproduce NAME` recomputes one result. Results about language models ({experiments}) are
judged from recorded training runs, by more than 2 standard errors with three seeds or more:
[experiments](experiments.md). A sentence with a question mark, and a verdict *open*, has too few seeds so far, or an
error too large to decide it. The papers' own misprints are on a page of their own: [misprints](misprints.md).

"""


def main(run: Path) -> None:
    """Write the page: a table, then a section for each result."""
    saved = {name: json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in studies()}
    page = [
        HEAD.format(
            seed=next(iter(saved.values()))["settings"]["seed"],
            experiments=", ".join(name for name, study in studies().items() if study.experiment),
        ),
        "| result | claim | verdict |\n|---|---|---|\n",
    ]
    for name, data in saved.items():
        anchor = name.replace("/", "").replace(".", "")
        page.append(f"| [{name}](#{anchor}) | {data['claim']} | {_short(data)} |\n")
    for name, data in saved.items():
        page.append(_section(name, data, run))
    (DOCS / "results.md").write_text(_with_literal_stars("".join(page)), encoding="utf-8")


def _with_literal_stars(text: str) -> str:
    """The text with the stars of π* and v* escaped: two of them would make what is between them italic."""
    return re.sub(r"(?<=[πv])\*", r"\\*", text)


def _section(name: str, data: dict, run: Path) -> str:
    picture = name.replace("/", "-")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        shutil.copyfile(run / f"{name}.{kind}", IMAGES / f"{picture}.{kind}")
    doc = (studies()[name].module.__doc__ or "").strip().split("\n\n", 1)[1]
    checks = "".join(f"- {_mark(check)} {check['claim']}: {check['measured']}\n" for check in data["checks"])
    return (
        f"\n## {name}\n\n{data['claim']}\n\n*{data['source']}*\n\n"
        f"[![{name}](images/reproduce/{picture}.png)](images/reproduce/{picture}.svg)\n\n"
        f"{checks}\n{' '.join(doc.split())}\n"
    )


def _short(data: dict) -> str:
    """The verdict; in place of a long list of sentences, which would squeeze the other columns, their number."""
    if len(data["verdict"]) <= LONGEST_VERDICT:
        return data["verdict"]
    outcome = Outcome(data["result"], [Check(**check) for check in data["checks"]], seconds=None)
    marks = [_mark(asdict(check)) for check in outcome.decisive]
    found = {"differs": marks.count("✗"), "open": marks.count("?")}
    parts = [f"{name}: {count} of {len(marks)} sentences, below" for name, count in found.items() if count]
    return ". ".join(parts)


def _mark(check: dict) -> str:
    return "✓" if check["holds"] else "✗" if check["decided"] else "?"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
