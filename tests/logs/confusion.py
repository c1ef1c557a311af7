"""Which cause the report names for which fault: `python tests/logs/confusion.py` prints the table of docs/logs.md.

Every fault occurs in contexts of four shapes, with and without a `group` column.
"""

import sys
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a program

from logs.synthetic import SHAPES, sampled

from klgrad import Rollout
from klgrad.logs.mismatch import Evidence, cause_of

TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)

OTHERS = {
    "stale": ("systematic", (0.1, 0.3, 1.0)),
    "dropout": ("random trainer", (0.1, 0.3, 1.0)),
    "top_p": ("filter", (0.8, 0.9, 0.95)),
    "top_k": ("filter", (5, 20)),
    "min_p": ("filter", (0.05,)),
    "shift": ("shift", (0,)),
    "bf16": ("rounding", (0,)),
    "bf16_logits": ("rounding", (0,)),
    "clean": ("none", (0,)),
}
"""By fault: the cause to name, and the amounts."""

CANNOT_TELL = "unexplained"


class Judged(NamedTuple):
    """The result for one log: the right cause, and the named one."""

    right: str
    named: str
    temperature: float
    found: dict[str, float]

    @property
    def kind(self):
        return "right" if self.named == self.right else "cannot tell" if self.named == CANNOT_TELL else "wrong"


def judge(data, grouped):
    evidence = Evidence()
    seen = Rollout(data["logp"], data["behavior_logp"], torch.ones_like(data["logp"]), data["behavior_logp"])
    evidence.add(seen, data["group"] if grouped else None)
    return cause_of(evidence)


def judged(faults, rows, seeds, shapes=tuple(SHAPES)):
    """Results with and without groups for every fault, shape and seed; `faults` are (name, amount, cause to name)."""
    results = {True: [], False: []}
    for (name, amount, right), shape, seed in product(faults, shapes, seeds):
        data = sampled(name, amount, rows=rows, seed=seed, shape=shape)
        for grouped, ones in results.items():
            cause = judge(data, grouped)
            ones.append(Judged(right, cause.name, amount, cause.statistics))
    return results


def temperatures(chosen=TEMPERATURES):
    return [("temperature", t, "temperature") for t in chosen]


def others():
    return [(name, amount, right) for name, (right, amounts) in OTHERS.items() for amount in amounts]


def off(one):
    """Distance of the range from the true temperature, as a share of it: 0 if it is inside."""
    low, high = (one.found[f"temperature_ratio/{end}"] for end in ("low", "high"))
    return max(low / one.temperature - 1, 1 - high / one.temperature, 0)


def width(one):
    """The range of the temperature, as a share of its middle."""
    low, high = (one.found[f"temperature_ratio/{end}"] for end in ("low", "high"))
    return 2 * (high - low) / (high + low)


def main(sizes):
    torch.set_num_threads(1)
    print("| fault | rows | `group` | logs | named | cannot tell | wrong | width of the range | off at most |")
    print("|---|---|---|---|---|---|---|---|---|")
    for label, faults in (("temperature", temperatures()), ("another", others())):
        for rows, seeds in sizes.items():
            for grouped, ones in judged(faults, rows, range(seeds)).items():
                kinds = Counter(one.kind for one in ones)
                named = [one for one in ones if one.kind == "right" and label == "temperature"]
                value = f"{median(map(width, named)):.1%} | {max(map(off, named)):.1%}" if named else " | "
                shares = " | ".join(f"{kinds[kind] / len(ones):.1%}" for kind in ("right", "cannot tell", "wrong"))
                cells = (label, rows, "yes" if grouped else "no", len(ones), shares, value)
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
                for one in ones:
                    if one.kind == "wrong":
                        print(f"wrong: {one}", file=sys.stderr)


if __name__ == "__main__":
    main({int(rows): int(seeds) for rows, seeds in (each.split(":") for each in sys.argv[1:])} or {48: 10, 104: 10})
