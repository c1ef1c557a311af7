"""Keep the README's generated parts true: `python scripts/readme.py` writes them, `--check` compares.

A part stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from klgrad.audit import audit, catalogue
from klgrad.audit.report import to_markdown

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

SHOWN = (
    "k1-loss",
    "k2-loss",
    "k3-loss",
    "k3-loss-clamped",
    "ratio-k3-loss",
    "k1-reward",
    "k3-reward",
    "k1-reward-group-std",
    "reverse-token-k1-token-ratio",
    "reverse-sequence-k1-prefix-ratio",
    "reverse-sequence-exact-loo-prefix-ratio",
    "squared-sequence",
)


def verdicts() -> str:
    """A selection of the catalogue."""
    return to_markdown([audit(catalogue()[name]) for name in SHOWN])


def example() -> str:
    """What the example of the README prints."""
    source = re.search(r"<!-- code -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert source, "the README has no `<!-- code -->` block"
    done = subprocess.run([sys.executable, "-c", source.group(1)], capture_output=True, text=True, check=True, cwd=ROOT)
    return f"```\n{done.stdout}```\n"


def results() -> str:
    """The table of docs/results.md, with its links turned to point there."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert table, "docs/results.md has no table"
    return table.group(0).replace("](#", "](docs/results.md#")


SHOWN_SETTINGS = (
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    "trl rloo normalize_advantages=False",
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean",
    "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=seq-mean-token-sum",
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=grpo",
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo",
    "openrlhf algo.kl in reward estimator=k1 advantage=rloo",
    "openrlhf algo.kl.use_loss estimator=k1 unbiased_gradient=False",
    "openrlhf algo.kl.use_loss estimator=k3 unbiased_gradient=True",
    "skyrl use_kl_loss kl_estimator_type=k3",
    "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
)


def frameworks() -> str:
    """Rows of docs/frameworks, with each framework's version and the date of its audit."""
    lines, made = [], []
    for page in sorted((ROOT / "docs" / "frameworks").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        title, date = re.search(r"# (.*)\n\nMade on (\S+)", text).groups()  # type: ignore[union-attr]
        made.append(f"[{title}](docs/frameworks/{page.name}) on {date}")
        header = re.findall(r"^\| loss .*\n\|.*\n", text, re.MULTILINE)[0]
        lines += [
            row for name in SHOWN_SETTINGS for row in re.findall(rf"^\| `{re.escape(name)}` .*\n", text, re.MULTILINE)
        ]
    return f"Audited: {', '.join(made)}.\n\n{header}{''.join(lines)}"


PARTS: dict[str, Callable[[], str]] = {
    "verdicts": verdicts,
    "example": example,
    "results": results,
    "frameworks": frameworks,
}


def main() -> int:
    """Write or check."""
    torch.set_num_threads(1)
    old = new = README.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert pattern.search(new), f"the README has no part {name!r}"
        text = make()
        new = pattern.sub(lambda found, text=text: found.group(1) + text + found.group(2), new)
    if "--check" in sys.argv[1:]:
        print("README is true" if old == new else "README is stale: run `make readme`")
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
