"""The exact KL of a token as a baseline of its sampled log-ratio (vOPD): the variance of the gradient at fixed weights.

The student is SmolLM2 with some of its layers, the teacher SmolLM2. Each vector is the gradient of one completion, by
all weights of the student's layers; every arm has the same completions. `relative_variance` is in units of the squared
length of the exact term's mean gradient, `ratio` is the variance in units of that of the plain log-ratio.

`python benchmarks/token_baseline.py` writes `results/token_baseline.csv`.
"""

import argparse
from typing import Any

import torch
from gradient_moments import Moments, relative_moments, with_errors
from harness import RESULTS, provenance, write
from topk_bias import STUDENTS, Completions, completions

from klgrad import KLTerm
from klgrad.kernels import from_logits

TEMPERATURE, COMPLETIONS = 0.7, 48
EXACT, PLAIN = "exact", "log-ratio"
TERMS = {
    EXACT: KLTerm(level="token", estimator="exact"),
    PLAIN: KLTerm(level="token"),
    "log-ratio less the exact KL": KLTerm(level="token", baseline="token_kl"),
}


def add_completion(moments: Moments, batch: Completions, row: int) -> None:
    """Add one completion's gradient to each arm."""
    student, teacher = batch.models
    rows, live = slice(row, row + 1), batch.live[row : row + 1]
    tokens = batch.ids[rows, -live.shape[1] :]
    with torch.no_grad():
        other = batch.logits(teacher, rows)
    found = from_logits(batch.logits(student, rows), tokens, other, mask=live, temperature=TEMPERATURE)
    weights = list(student.model.layers.parameters())
    for arm, term in TERMS.items():
        parts = torch.autograd.grad(term(found.rollout(live)).loss, weights, retain_graph=True)
        moments.add(arm, torch.cat([x.flatten() for x in parts]))


def summary(moments: Moments) -> list[dict[str, Any]]:
    """A row for each arm. The ratio's error is that of the arm with the blocks of the plain one held fixed."""
    plain = moments.products(PLAIN, EXACT).variance()
    rows: list[dict[str, Any]] = []
    for arm in TERMS:
        found = with_errors(
            moments.products(arm, EXACT), lambda x: {**relative_moments(x), "ratio": x.variance() / plain}
        )
        names = ("relative_variance", "relative_variance_se", "cosine", "ratio", "ratio_se")
        rows.append({"arm": arm, **{name: f"{found[name]:.4g}" for name in names}})
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    made: list[dict[str, Any]] = []
    for name, student in STUDENTS.items():
        batch, moments = completions(student, TEMPERATURE, COMPLETIONS), Moments()
        for row in range(COMPLETIONS):
            add_completion(moments, batch, row)
            print(name, row + 1, "of", COMPLETIONS, flush=True)
        sizes = {"student": name, "temperature": TEMPERATURE, "completions": COMPLETIONS}
        made += [{**sizes, **row, **provenance()} for row in summary(moments)]
        write(made, RESULTS / "token_baseline.csv")


if __name__ == "__main__":
    main()
