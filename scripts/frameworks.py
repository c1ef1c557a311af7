"""Audit the frameworks that can be audited in this environment, or those that are named, and record what is found.

Each has its table in src/klgrad/frameworks/records/NAME.json, which `klgrad audit` shows where the framework is not
installed, and the same as a page in docs/frameworks/NAME.md. `make frameworks` runs this in all environments; the table
in the README is made from the records.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from klgrad.audit import audit, policy_sentences as policies
from klgrad.audit.policy import PolicyResult, audit_whole
from klgrad.audit.sentences import summary
from klgrad.audit.terminal import COLUMNS, cells_of, markdown_table
from klgrad.frameworks import DEFAULTS, FRAMEWORKS, Framework, Recorded, recorded
from klgrad.frameworks.conversion import pull_of

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "frameworks"
RECORDS = ROOT / "src" / "klgrad" / "frameworks" / "records"


def main(names: list[str]) -> None:
    """Record each framework, with its version and the date."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    PAGES.mkdir(exist_ok=True)
    for name in names or FRAMEWORKS:
        framework = FRAMEWORKS[name]
        if framework.version is None:
            print(framework.remark)
            continue
        print(framework.title, file=sys.stderr)
        results = [audit(subject) for subject in framework.subjects()]
        rows = [list(cells_of(r)) for r in results]
        verdicts = {r.name: (r.verdict, r.verdict_off_policy, r.holds) for r in results}
        words = {r.name: (summary(r.anatomy), summary(r.anatomy, on_policy=False)) for r in results}
        whole = [audit_whole(subject) for subject in framework.policy_losses()] if framework.whole_losses else []
        date = datetime.now(UTC).date().isoformat()
        earlier = recorded(name)
        known = Recorded(
            framework=name,
            version=framework.version,
            date=date,
            columns=list(COLUMNS),
            rows=rows,
            verdicts=verdicts,
            words=words,
            policy_losses=[list(policies.cells_of(r)) for r in whole],
            pulls={r.name: pull_of(r) for r in results},
            history=[] if earlier is None else earlier.history_before(framework.version),
        )
        known.write(RECORDS)
        page = _head(framework, date) + markdown_table(rows, COLUMNS) + (_policy_losses(name, whole) if whole else "")
        (PAGES / f"{name}.md").write_text(page, encoding="utf-8")


def _head(framework: Framework, date: str) -> str:
    """What was audited and when, and the default settings."""
    of = "from its own installed code"
    if framework.transcribed:
        files = ", ".join(f"`{file}`" for file in framework.files)
        of = f"from its formulae, transcribed from {files} of {framework.distribution}; its own code was not run"
    default = DEFAULTS[framework.name]
    made = f"Made on {date} by `klgrad audit {framework.name}`, {of}."
    return (
        f"# {framework.name} {framework.version}\n\n{made}\n\n"
        f"Default settings: {default.settings}, which is `{default.subject}`.\n\n"
        + "".join(f"{caveat}\n\n" for caveat in framework.caveats)
    )


def _policy_losses(name: str, whole: list[PolicyResult]) -> str:
    said = f"From `klgrad audit {name} --whole`; [the columns](../frameworks.md#whole-policy-losses)."
    return f"\n## Its whole policy losses\n\n{said}\n\n{policies.to_markdown(whole)}"


if __name__ == "__main__":
    main(sys.argv[1:])
