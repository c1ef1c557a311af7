"""The exact KL of a token as a baseline of its sampled log-ratio (vOPD): the variance of the gradient at fixed weights.

The student is SmolLM2 with 20 of its 30 layers, the teacher SmolLM2. Each vector is the gradient of one completion, by
all weights of the student's layers; every arm has the same completions. `ratio` is the variance in units of that of the
plain log-ratio.

`python benchmarks/token_baseline.py` writes `results/token_baseline.csv`.
"""

import argparse
from typing import Any

import torch
from gradient_moments import Moments, with_errors
from harness import RESULTS, provenance, write
from topk_bias import STUDENTS, Completions, completions

from klgrad import KLTerm
from klgrad.kernels import from_logits

STUDENT, TEMPERATURE, COMPLETIONS = "20 of 30 layers", 0.7, 48
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
    """A row for each arm. The error of a ratio is that of the arm alone."""
    plain = moments.products(PLAIN, EXACT).variance()
    rows: list[dict[str, Any]] = []
    for arm in TERMS:
        found = with_errors(moments.products(arm, EXACT), lambda x: {"ratio": x.variance() / plain})
        rows.append({"arm": arm, **{name: f"{value:.4g}" for name, value in found.items()}})
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    batch, moments = completions(STUDENTS[STUDENT], TEMPERATURE, COMPLETIONS), Moments()
    for row in range(COMPLETIONS):
        add_completion(moments, batch, row)
        print(row + 1, "of", COMPLETIONS, flush=True)
    sizes = {"student": STUDENT, "temperature": TEMPERATURE, "completions": COMPLETIONS}
    write([{**sizes, **row, **provenance()} for row in summary(moments)], RESULTS / "token_baseline.csv")


if __name__ == "__main__":
    main()
