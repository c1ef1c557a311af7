"""Write docs/results.md and its figures from the numbers of `klgrad reproduce --out DIR`: `results.py DIR`."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from klgrad.drawing import KINDS
from klgrad.papers.study import VERDICTS, Check, Outcome, studies

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images" / "reproduce"
MARKS = dict(zip(VERDICTS, "✓✗?", strict=True))
LONGEST_VERDICT = 300
"""Characters of a verdict in the table."""

HEAD = """# Reproduced results

`make results` (`klgrad reproduce`, seed {seed}) writes this page: every number in a verdict or a check was measured in
that run. Sentences marked *(ours)* are not from the paper, and the verdict on its claim does not depend on them.
Statistical sentences are checked by their z-score over repeats (more than 4 standard errors), the others by the limit
or tolerance shown. `klgrad reproduce NAME` recomputes one result. Results about language models ({experiments}) are
judged from recorded training runs, by more than 2 standard errors with three seeds or more:
[experiments](experiments.md). Their model is SmolLM2-135M-Instruct from a file with 4-bit weights (Q4_1), de-quantised.

A sentence *holds* (✓), is *contradicted* (✗) if its opposite is shown, or is *undecided* (?): its error is too large,
it has too few seeds, its runs are too short for it, or it depends on a setting that the paper does not give.
{counts}
The papers' own [misprints](papers.md#misprints).

"""


def main(run: Path) -> None:
    """Write the page: a table, then a section for each result."""
    saved = {name: json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in studies()}
    page = [
        HEAD.format(
            seed=next(iter(saved.values()))["settings"]["seed"],
            experiments=", ".join(name for name, study in studies().items() if study.experiment),
            counts=_in_all(saved.values()),
        ),
        "| result | claim | verdict |\n|---|---|---|\n",
    ]
    for name, data in saved.items():
        page.append(f"| [{name}](#{_anchor(name)}) | {data['claim']} | {_short(data)} |\n")
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
    checks = "".join(f"- {MARKS[check.verdict]} {check.sentence}: {check.measured}\n" for check in _checks(data))
    return (
        f"\n## {name}\n\n{data['claim']}\n\n*{data['source']}*\n\n"
        f"[![{name}](images/reproduce/{picture}.png)](images/reproduce/{picture}.svg)\n\n"
        f"{checks}\n{' '.join(doc.split())}\n"
    )


def _short(data: dict) -> str:
    """The verdict; in place of a long list of sentences, which would squeeze the other columns, their number."""
    if len(data["verdict"]) <= LONGEST_VERDICT:
        return data["verdict"]
    return f"{Outcome(data['result'], _checks(data), seconds=None).counts} sentences, below"


def _checks(data: dict) -> list[Check]:
    return [Check(**check) for check in data["checks"]]


def _in_all(saved: Iterable[dict]) -> str:
    checks = [check for data in saved for check in _checks(data)]
    theirs, ours = (Counter(check.verdict for check in checks if check.ours is whose) for whose in (False, True))
    words = lambda found: ", ".join(f"{verdict} {found[verdict]}" for verdict in VERDICTS)
    return f"Of the sentences without the mark *(ours)*: {words(theirs)}. Of those with it: {words(ours)}."


def counts_by_paper() -> str:
    """How many sentences of each source hold, are contradicted and are undecided, as docs/results.md says."""
    return _counted("source", {name: re.split("[,;]", study.source)[0] for name, study in studies().items()})


def counts_by_experiment() -> str:
    """The same for each study of recorded training runs."""
    link = lambda name: f"[{name}](results.md#{_anchor(name)})"
    return _counted("study", {name: link(name) for name, study in studies().items() if study.experiment})


def _counted(head: str, names: dict[str, str]) -> str:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    theirs, ours = Counter(), Counter()
    for name, shown in names.items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for mark, text in re.findall(r"^- ([✓✗?]) (.*)$", section, re.MULTILINE):
            (ours if text.startswith("(ours)") else theirs)[shown, mark] += 1
    lines = [f"| {head} | {' | '.join(VERDICTS)} | *(ours)*: {' | '.join(VERDICTS)} |", "|---|---|---|---|---|---|---|"]
    for shown in dict.fromkeys(names.values()):
        cells = [str(found[shown, mark]) for found in (theirs, ours) for mark in MARKS.values()]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _anchor(name: str) -> str:
    return name.replace("/", "").replace(".", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
