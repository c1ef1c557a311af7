"""Run the notebooks of docs/notebooks and keep what their cells print, for `readme.py`; and their pages of the site.

The cells run in this process, so that no kernel and no further package is needed. They print and draw nothing.
"""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parent.parent / "docs" / "notebooks"


def notebooks() -> dict[Path, str]:
    """The text of each notebook, with the outputs of a run from its first cell to its last."""
    return {path: _executed(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def pages() -> dict[str, str]:
    """The notebooks as pages, by the name of the page: their text, their code, and what it printed."""
    return {f"notebooks/{path.stem}.md": _page(path) for path in NOTEBOOKS.glob("*.ipynb")}


def _page(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def _executed(path: Path) -> str:
    notebook, names = json.loads(path.read_text(encoding="utf-8")), {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["execution_count"] = number
        cell["outputs"] = _run("".join(cell["source"]), names)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    with redirect_stdout(StringIO()) as printed:
        exec(compile(source, "cell", "exec"), names)
    text = printed.getvalue()
    return [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
