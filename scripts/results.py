"""Write docs/results.md, its pages and figures from the numbers of `klgrad reproduce --out DIR`: `results.py DIR`."""

import json
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import experiments
from reference.text import table

from klgrad.drawing import KINDS
from klgrad.papers.study import VERDICTS, Check, Outcome, studies

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images" / "reproduce"
MARKS = dict(zip(VERDICTS, "✓✗?", strict=True))
LONGEST_VERDICT = 300
"""Characters of a verdict in the table."""
PAGES = {
    "tang-munos/fig7": "experiments/reward-and-kl.md#reward-at-equal-kl",
    "tang-munos/fig8": "experiments/distillation.md#far-from-the-teacher",
    "tang-munos/long-runs": "experiments/reward-and-kl.md#long-runs",
    "rethinking/language-model": "experiments/places.md#grpos-losses",
    "comedy/on-policy": "experiments/places.md",
    "comedy/asynchronous": "experiments/stale-completions.md",
    "frpo/kl-in-reward": "experiments/division.md",
    "asyncopd/stale-distillation": "experiments/stale-distillation.md",
    "klgrad/discount": "experiments/distillation.md#a-discounted-future",
    "klgrad/reuse": "experiments/stale-distillation.md#repeated-batches",
    "baselines": "experiments/reward-and-kl.md#the-untrained-model",
    "klgrad/k1-on-stale-samples": "experiments/stale-completions.md#a-law-for-k1-as-a-loss",
    "klgrad/division": "experiments/division.md#what-the-division-breaks",
    "klgrad/degenerate-distillation": "experiments/distillation.md#when-distillation-is-degenerate",
}
"""Where the sentences of a study are, if it has a page that is written by hand."""

HEAD = """# Reproduced results

`make results` (`klgrad reproduce`, seed {seed}) writes this table and the pages of the tabular results, which have
every sentence with its measured value. `klgrad reproduce NAME` recomputes one result. Statistical sentences are
checked by their z-score over repeats (more than 4 standard errors), the others by the limit or tolerance shown. Results
about language models are judged from recorded training runs, seed by seed, by more than 2 standard errors with three
seeds or more: [experiments](experiments.md).

A sentence *holds* (✓), is *contradicted* (✗) if its opposite is shown, or is *undecided* (?): its error is too large,
it has too few seeds, its runs are too short for it, or it depends on a setting that the paper does not give. Sentences
marked *(ours)* are not from the paper, and the verdict on its claim does not depend on them.
{counts}
The papers' own [misprints](papers.md#misprints).

"""


def main(run: Path) -> None:
    """Write the table, and for each group of results without a page of their own a page."""
    saved = {name: json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in studies()}
    seed = next(iter(saved.values()))["settings"]["seed"]
    page = [HEAD.format(seed=seed, counts=_in_all(saved.values())), "| result | claim | verdict |\n|---|---|---|\n"]
    pages: dict[str, list[str]] = defaultdict(list)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, data in saved.items():
        page.append(f"| [{name}]({place_of(name)}) | {data['claim']} | {_short(data)} |\n")
        for kind in KINDS:
            shutil.copyfile(run / f"{name}.{kind}", IMAGES / f"{name.replace('/', '-')}.{kind}")
        if name not in PAGES:
            pages[name.split("/")[0]].append(_section(name, data))
    (DOCS / "results.md").write_text(_with_literal_stars("".join(page)), encoding="utf-8")
    for group, sections in pages.items():
        source = saved[next(name for name in saved if name.startswith(group))]["source"]
        text = f"# Results: {group}\n\n*{source}*\n{''.join(sections)}"
        (DOCS / "results" / f"{group}.md").write_text(_with_literal_stars(text), encoding="utf-8")


def place_of(name: str) -> str:
    """The page of a result, from docs/, with its anchor if it is one of several there."""
    anchor = name.replace("/", "").replace(".", "")
    return PAGES.get(name) or f"results/{name.split('/')[0]}.md#{anchor}"


def _with_literal_stars(text: str) -> str:
    """The text with the stars of π* and v* escaped: two of them would make what is between them italic."""
    return re.sub(r"(?<=[πv])\*", r"\\*", text)


def _section(name: str, data: dict) -> str:
    picture = name.replace("/", "-")
    checks = "".join(f"- {MARKS[check.verdict]} {check.sentence}: {check.measured}\n" for check in _checks(data))
    return (
        f"\n## {name}\n\n{data['claim']}\n\n"
        f"[![{name}](../images/reproduce/{picture}.png)](../images/reproduce/{picture}.svg)\n\n"
        f"{checks}\n{studies()[name].paragraphs[1]}\n"
    )


def _short(data: dict) -> str:
    """The verdict; in place of a long list of sentences, and of one that has a page, their number."""
    if data["result"] not in PAGES and len(data["verdict"]) <= LONGEST_VERDICT:
        return data["verdict"]
    return f"{Outcome(data['result'], _checks(data), seconds=None).counts} sentences"


def _checks(data: dict) -> list[Check]:
    return [Check(**check) for check in data["checks"]]


def _in_all(saved: Iterable[dict]) -> str:
    checks = [check for data in saved for check in _checks(data)]
    theirs, ours = (Counter(check.verdict for check in checks if check.ours is whose) for whose in (False, True))
    words = lambda found: ", ".join(f"{verdict} {found[verdict]}" for verdict in VERDICTS)
    return f"Of the sentences without the mark *(ours)*: {words(theirs)}. Of those with it: {words(ours)}."


def counts_by_paper() -> str:
    """How many sentences of each source hold, are contradicted and are undecided."""
    return _counted("source", {name: re.split("[,;]", study.source)[0] for name, study in studies().items()})


def counts_by_experiment() -> str:
    """The same for each study of recorded training runs."""
    link = lambda name: f"[{name}]({PAGES[name]})"
    return _counted("study", {name: link(name) for name, study in studies().items() if study.experiment})


def _counted(head: str, names: Mapping[str, str]) -> str:
    found: Counter[tuple[str, str, bool]] = Counter()
    for name, shown in names.items():
        found.update((shown, verdict, whose) for verdict, whose in _verdicts(name))
    first, *others = VERDICTS
    cells = lambda shown: (str(found[shown, verdict, whose]) for whose in (False, True) for verdict in VERDICTS)
    heads = (head, *VERDICTS, f"*(ours)*: {first}", *others)
    return table(heads, ((shown, *cells(shown)) for shown in dict.fromkeys(names.values())))


def _verdicts(name: str) -> list[tuple[str, bool]]:
    """The verdict of each sentence and whether it is ours: of recorded runs as judged now, of others from a page."""
    if studies()[name].experiment:
        return [(check.verdict, check.ours) for check in experiments.judged(name)]
    if name in PAGES:
        return _counts_in_table(name)
    page = (DOCS / place_of(name).partition("#")[0]).read_text(encoding="utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    words = {mark: verdict for verdict, mark in MARKS.items()}
    found = re.findall(r"^- ([✓✗?]) (.*)$", section, re.MULTILINE)
    return [(words[mark], text.startswith("(ours)")) for mark, text in found]


def _counts_in_table(name: str) -> list[tuple[str, bool]]:
    """The verdicts of a study with a page that is written by hand, from the table."""
    table = (DOCS / "results.md").read_text(encoding="utf-8")
    (verdict,) = re.findall(rf"^\| \[{name}\].* \| (.*) \|$", table, re.MULTILINE)
    return [(word, False) for word in VERDICTS for n in re.findall(rf"{word} (\d+)", verdict) for _ in range(int(n))]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
