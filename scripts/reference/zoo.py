"""A page for each loss of `klgrad.zoo`: definition, verdict, and what to use instead or the term with its target."""

from klgrad import zoo
from klgrad.audit.sentences import summary
from klgrad.core.term import KLTerm, as_code
from klgrad.targets import TARGETS
from klgrad.zoo import CELLS, Cell

from .text import (
    GENERATED,
    as_markdown,
    audited,
    definition,
    link_to_target,
    sections,
    source_of,
    table,
    verdict_table,
)

PLACES = {
    "Differentiated as a loss": "k1-loss",
    "As a loss, weighted by a ratio to the sampler": "ratio-k3-loss",
    "In the reward": "k1-reward",
    "In both": "k1-both",
}
"""The first loss of each placement, in the order of `CELLS`."""

INDEX = """# The zoo

KL losses as found in published code and papers, sound or not. `klgrad.zoo.get(name)` returns one, and
`klgrad audit NAME` audits it. A loss takes a `Rollout` and returns a scalar.

*Off-policy* samples come from another policy than π, such as a stale worker. [The audit](../audit.md) explains the
words.
"""


def pages() -> dict[str, str]:
    """The index and a page for each loss."""
    return {"zoo/index.md": _index()} | {f"zoo/{name}.md": _page(cell) for name, cell in CELLS.items()}


def _index() -> str:
    parts = [INDEX]
    names = list(CELLS)
    starts = [names.index(first) for first in PLACES.values()]
    for title, start, end in zip(PLACES, starts, [*starts[1:], len(names)], strict=True):
        rows = [
            (f"[{name}]({name}.md)", summary(audited(name).anatomy), summary(audited(name).anatomy, on_policy=False))
            for name in names[start:end]
        ]
        parts.append(f"\n## {title}\n\n{table(('loss', 'on-policy it descends', 'off-policy'), rows)}")
    return "".join([*parts, f"\n{GENERATED}\n"])


def _page(cell: Cell) -> str:
    code = source_of(cell.name.replace("-", "_"), zoo)
    parts = [
        f"# {cell.name}\n\n{sections(cell.doc)[0]}\n\n{definition(cell.doc)}",
        f"\n<!-- not run here: tests/claims audits it -->\n```python\n{code}\n```\n",
        f"\n## What it descends\n\n{verdict_table(cell.name)}",
        f"\n{_targets(cell)}",
    ]
    advice = audited(cell.name).advice
    steps = "".join(f"- {as_markdown(remedy.pieces)}\n" for remedy in advice.remedies)
    parts.append(f"\n## What to use instead\n\n{steps}" if steps else f"\n{_terms(cell)}")
    return "".join([*parts, f"\n{GENERATED}\n"])


def _targets(cell: Cell) -> str:
    on, off = (TARGETS[x] for x in cell.descends)
    return f"On fresh samples: {link_to_target(on.name)}. On stale samples: {link_to_target(off.name)}.\n"


def _terms(cell: Cell) -> str:
    """The plain terms with the same gradient on-policy."""
    terms = (KLTerm(), KLTerm(level="token"), KLTerm(divergence="forward", level="token", estimator="k3"))
    same = [as_code(term) for term in terms if term.descends.on_policy == cell.descends.on_policy]
    return "".join(f"`{code}` descends the same target on-policy.\n" for code in same)
