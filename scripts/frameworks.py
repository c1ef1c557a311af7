"""Audit the frameworks that are installed in this environment, and write docs/frameworks/NAME.md for each.

`make frameworks` runs it in both environments; the table in the README consists of rows of these pages.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from klgrad.adapters import FRAMEWORKS
from klgrad.audit import audit
from klgrad.audit.render.plain import to_markdown

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
        table = to_markdown([audit(subject) for subject in framework.subjects()])
        date = datetime.now(UTC).date().isoformat()
        made = f"Made on {date} by `klgrad audit {name}`, from its own installed code."
        head = f"# {name} {framework.installed}\n\n{made}\n\n"
        (PAGES / f"{name}.md").write_text(head + table, encoding="utf-8")


if __name__ == "__main__":
    main()
