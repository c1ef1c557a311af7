"""Bias and variance of the gradients whose training runs `exp_discount.py` compares, at fixed weights.

A discount below 1 leaves out part of what a token does to later tokens: a bias. What it includes is estimated from
sampled futures: a variance. Here many batches of completions are sampled from one student, and each batch gives the
gradient of every arm. The student is the one that all runs start from, or the one after some updates of the exact
token-level term. Squared means and squared biases have no part of the variance, and all have standard errors over
batches: `gradient_moments.py`. The sums for this take 3.2 GB for each of the twelve arms.

    python benchmarks/exp_gradient.py MODEL

Result: src/klgrad/papers/recorded/gradient.csv.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from distill_runs import COMMON, LAYERS
from exp_discount import DISCOUNTS, LEAVE_ONE_OUT, SAMPLED, create_models
from gradient_moments import Moments, with_errors
from harness import RECORDED, provenance, write

from klgrad import KLTerm
from klgrad.core.rollout import Rollout
from klgrad.trl.compat import generate, padded, tokenize_prompts

RATE = 1e-4
"""Of the updates that make the second student."""
GROUP = 8
ROWS = 256
TRUE = "exact-1" + LEAVE_ONE_OUT
"""The arm with the gradient of the sequence-level KL; its mean is what the others' means are compared with."""
SAME = 0.02
"""Largest relative distance of one gradient from itself. The first backward pass has logits of 16 bits and later ones
compute them again; the kernels' gradients are within 0.4% of float64 in both cases (docs/kernels.md)."""
TERMS = {
    **{f"exact-{d:g}": KLTerm(estimator="exact", discount=d) for d in DISCOUNTS},
    **{
        f"exact-{d:g}{LEAVE_ONE_OUT}": KLTerm(estimator="exact", discount=d, baseline="leave_one_out")
        for d in DISCOUNTS
        if d
    },
    **{f"k1-{d:g}{LEAVE_ONE_OUT}": KLTerm(discount=d, baseline="leave_one_out") for d in SAMPLED},
}
"""The arms of `exp_discount.py`."""


def summary(moments: Moments, true: str) -> Iterator[dict[str, Any]]:
    """A row for each arm, in units of the squared length of the true gradient."""
    for arm, squares in moments.squares.items():
        found = moments.products(arm, true)
        numbers = {"squared_norm": found.between(found.own), **with_errors(found)}
        sizes = {"batches": len(squares), "blocks": len(found.counts), "completions": ROWS}
        yield {"arm": arm, **sizes, **{name: f"{value:.5g}" for name, value in numbers.items()}}


def measure(trainer: Any, prompts: Sequence[list[int]], batches: int, terms: dict[str, KLTerm]) -> Moments:
    """Gradients of all arms on `batches` batches of `ROWS` completions each."""
    moments, parameters = Moments(), [p for p in trainer.model.parameters() if p.requires_grad]
    groups = ROWS // GROUP
    for i in range(batches):
        chosen = [prompts[(i * groups + j) % len(prompts)] for j in range(groups)]
        ids = [list(prompt) for prompt in chosen for _ in range(GROUP)]
        with torch.no_grad():
            batch = padded(trainer, ids, generate(trainer, ids))
        exact = trainer.scorer.exact(trainer.model, batch)
        mask = batch["completion_mask"].bool()
        group = torch.arange(groups, device=mask.device).repeat_interleave(GROUP)
        rollout = Rollout(exact.logp, exact.ref_logp, mask, group=group, token_reverse_kl=exact.reverse_kl)
        for arm, term in terms.items():
            moments.add(arm, _gradient(term, rollout, parameters))
        if i == 0:
            first = next(iter(terms))
            _check_same(moments.sums[first][0], _gradient(terms[first], rollout, parameters))
        print(f"batch {i + 1} of {batches}", flush=True)
    return moments


def _gradient(term: KLTerm, rollout: Rollout, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    found = torch.autograd.grad(term(rollout).per_token.sum() / ROWS, parameters, retain_graph=True)
    return torch.cat([each.flatten().float() for each in found])


def _check_same(first: torch.Tensor, again: torch.Tensor) -> None:
    """Check that a gradient is the same in a later backward pass of the same graph.

    It is not with layers whose backward pass overwrites what the forward pass saved, as Liger's gated layers do.
    """
    off = float((again - first).norm() / first.norm())
    if not off < SAME:
        raise RuntimeError(
            f"Expected the same gradient from a later backward pass of one graph, within {SAME}. Received one that is "
            f"{off:.2g} of its length away. Use layers that leave saved tensors as they are."
        )


def at_weights(given: argparse.Namespace, updates: int) -> list[dict[str, Any]]:
    """The rows of one student: the start, or the one after some updates of the exact token-level term."""
    import graph_sampling
    import shared_prompts

    from klgrad.training.build import build, models_of
    from klgrad.training.settings import parse

    teacher = given.runs / "teacher-fixed-length"
    chosen = {**COMMON, "num_iterations": 1, "learning_rate": RATE, "seed": 0, "teacher": teacher}
    chosen |= {"max_steps": max(updates, 1), "model": f"{teacher}:{LAYERS}", "output_dir": given.runs / "gradient"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    settings = parse("distill", [*flags, "--kl_estimator", "exact", "--kl_reduction", "sequence"])
    trainer, _ = build(settings, models_of(settings))
    graph_sampling.install(trainer)
    shared_prompts.install(trainer)
    if updates:
        trainer.train()
    trainer.model.train()
    data: Any = trainer.train_dataset
    prompts = tokenize_prompts(trainer, [row["prompt"] for row in data])
    random.Random(0).shuffle(prompts)  # the dataset has its tasks in turn, and training shuffles it
    moments = measure(trainer, prompts, given.batches, TERMS)
    return [{"update": updates, **row} for row in summary(moments, TRUE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the unpacked model")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV file")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of unfinished work")
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--updates", type=int, nargs="*", default=[0, 20], help="of the students")
    given = parser.parse_args()
    create_models(given)
    rows: list[dict[str, Any]] = []
    for updates in given.updates:
        rows += at_weights(given, updates)
        write([{**row, **provenance()} for row in rows], given.out / "gradient.csv")
    for row in rows:
        names = ("relative_squared_bias", "relative_variance", "cosine")
        print(f"{row['update']:>4} {row['arm']:<28}" + "".join(f"{name} {row[name]:>10}  " for name in names))


if __name__ == "__main__":
    main()
