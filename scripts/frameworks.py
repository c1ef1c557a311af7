"""Audit the frameworks that are installed in this environment; write docs/frameworks/NAME.md and NAME.json for each.

`make frameworks` runs it in both environments; the table in the README is made from the JSON files.
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from klgrad.adapters import FRAMEWORKS
from klgrad.audit import audit
from klgrad.audit.render.plain import cells_of, markdown_table

PAGES = Path(__file__).parent.parent / "docs" / "frameworks"


def main() -> None:
    """Write one page per framework, with its version and the date."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    PAGES.mkdir(exist_ok=True)
    for name, framework in FRAMEWORKS.items():
        if framework.installed is None:
            print(framework.remark)
            continue
        print(f"{name} {framework.installed}", file=sys.stderr)
        rows = [cells_of(audit(subject)) for subject in framework.subjects()]
        date = datetime.now(UTC).date().isoformat()
        known = {"framework": name, "version": framework.installed, "date": date, "rows": rows}
        (PAGES / f"{name}.json").write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        made = f"Made on {date} by `klgrad audit {name}`, from its own installed code."
        head = f"# {name} {framework.installed}\n\n{made}\n\n"
        (PAGES / f"{name}.md").write_text(head + markdown_table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
