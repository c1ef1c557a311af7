"""Bias and noise of the gradient of a KL over some of the entries, on SmolLM2's own distributions.

The teacher is SmolLM2, the student SmolLM2 with some of its layers; the tokens are those of the student's completions.
All numbers are exact sums over the vocabulary, in float64: nothing is sampled but the completions. The gradient is that
by the logits; bias and noise are relative to the root mean square of the exact gradient over the tokens.

`python benchmarks/topk_bias.py` writes `results/topk_bias.csv`.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import RESULTS, provenance, write
from torch import Tensor

from klgrad.core.divergences import named
from klgrad.kernels import head_kl, lumped_kl
from klgrad.models import resolve
from klgrad.training.data import TASKS

STUDENTS = {"20 of 30 layers": "smollm2:20", "28 of 30 layers": "smollm2:28"}
TEMPERATURES = (0.7, 1.0)
ENTRIES = (1, 16, 64, 256)
PROMPTS, LENGTH = 12, 12
CLIP = 0.05
"""The bound of each entry of a KL in one public recipe of self-distillation."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""From log-probs of the student and the teacher, (N, k) or (N, V), to (N,) losses."""


def plain(log_p: Tensor, log_q: Tensor, divergence: str) -> Tensor:
    """The textbook terms of each entry."""
    return log_p.exp() * (log_p - log_q) if divergence == "reverse" else log_q.exp() * (log_q - log_p)


def over_entries(divergence: str) -> dict[str, Loss]:
    """What is summed over the entries, by how the others are treated."""

    def renormalised(log_p: Tensor, log_q: Tensor) -> Tensor:
        return plain(log_p.log_softmax(-1), log_q.log_softmax(-1), divergence).sum(-1)

    return {
        "lump": lambda log_p, log_q: lumped_kl(log_p, log_q, divergence),
        "none": lambda log_p, log_q: head_kl(log_p, log_q, divergence),
        "none, textbook terms": lambda log_p, log_q: plain(log_p, log_q, divergence).sum(-1),
        "none, renormalised": renormalised,
    }


def gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """(N, V) of each token's loss by its logits."""
    z = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(z.log_softmax(-1)).sum(), z)[0]


def compared(found: Tensor, exact: Tensor, variance: Tensor | None = None) -> dict[str, str]:
    """Bias, noise and direction of a gradient, over all tokens."""
    size, length = float(exact.norm()), float(found.norm())
    cosine = f"{float((found * exact).sum()) / (length * size):.4f}" if length else ""
    noise = 0.0 if variance is None else math.sqrt(float(variance.sum()))
    return {"bias": f"{float((found - exact).norm()) / size:.3g}", "noise": f"{noise / size:.3g}", "cosine": cosine}


def variance_of_scores(p: Tensor, coefficient: Tensor) -> Tensor:
    """(N,) the variance of c_y ∇log p_y, y ~ p, by the logits: the score of y is e_y - p."""
    square, total = p.square().sum(-1), (p * coefficient).sum(-1)
    second = (p * coefficient.square() * (1 - 2 * p + square[:, None])).sum(-1)
    mean = (p * coefficient).square().sum(-1) - 2 * total * (p.square() * coefficient).sum(-1) + total.square() * square
    return second - mean


def measures(logits: Tensor, log_q: Tensor, divergence: str) -> Iterator[dict[str, Any]]:
    """A row for each way to compute the gradient."""
    log_p = logits.log_softmax(-1)
    p, slope = log_p.exp(), named(divergence).slope(log_p - log_q)
    exact = gradient(lambda x: plain(x, log_q, divergence).sum(-1), logits)
    row = {"divergence": divergence, "entries": "all", "k": "", "mass": "1"}
    clipped = gradient(lambda x: plain(x, log_q, divergence).clamp(max=CLIP).sum(-1), logits)
    yield {**row, "tail": f"each entry clipped at {CLIP}", **compared(clipped, exact)}
    yield {**row, "entries": "sampled", "tail": "", **compared(exact, exact, variance_of_scores(p, slope))}
    centred = slope - (p * slope).sum(-1, keepdim=True)
    baseline = compared(exact, exact, variance_of_scores(p, centred))
    yield {**row, "entries": "sampled", "tail": "less its mean at the prefix", **baseline}
    for whose, k in ((whose, k) for whose in ("teacher", "student") for k in ENTRIES):
        ids = (log_q if whose == "teacher" else log_p).topk(k).indices
        row |= {"entries": f"{whose}'s", "k": k, "mass": f"{float(p.gather(1, ids).sum(-1).mean()):.3f}"}
        for tail, loss in over_entries(divergence).items():
            found = gradient(lambda x, loss=loss, ids=ids: loss(x.gather(1, ids), log_q.gather(1, ids)), logits)
            yield {**row, "tail": tail, **compared(found, exact)}
        outside = slope.scatter(1, ids, 0.0)
        yield {**row, "tail": "sampled", **compared(exact, exact, variance_of_scores(p, outside))}


class Completions(NamedTuple):
    """A student's completions of some prompts, on the left of which is padding.

    Attributes:
        models: the student and the teacher.
        ids: (B, P + T) prompts and completions.
        mask: (B, P + T) 0 at padding before a prompt.
        live: (B, T) whether a token belongs to the completion, with its end.
    """

    models: list[Any]
    ids: Tensor
    mask: Tensor
    live: Tensor

    def logits(self, model: Any, rows: slice = slice(None)) -> Tensor:
        """(B, T, V) at the tokens of the completions."""
        ids, mask = self.ids[rows], self.mask[rows]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -self.live.shape[1] - 1 : -1]


@torch.no_grad()
def completions(student: str, temperature: float, prompts: int = PROMPTS) -> Completions:
    """Sample what the student says to word problems."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    load: Any = AutoModelForCausalLM.from_pretrained
    models = [load(x, dtype=torch.float32).eval() for x in (resolve(student), path)]
    rng = random.Random(0)
    asked = [TASKS["word-problems"].draw(rng, lambda: rng.randint(1, 9))[0] for _ in range(prompts)]
    chats = [[{"role": "user", "content": text}] for text in asked]
    given: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": LENGTH}
    ids = models[0].generate(**given, **how)
    said = ids[:, given["input_ids"].shape[1] :]
    is_end = said == tokenizer.eos_token_id
    mask = torch.cat([given["attention_mask"], torch.ones_like(said)], 1)
    return Completions(models, ids, mask, is_end.cumsum(1) - is_end.long() == 0)


@torch.no_grad()
def distributions(student: str, temperature: float) -> tuple[Tensor, Tensor]:
    """(N, V) the student's logits and the teacher's log-probs at the tokens of the student's completions."""
    batch = completions(student, temperature)
    own, other = (batch.logits(model)[batch.live].double() / temperature for model in batch.models)
    return own, other.log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    made: list[dict[str, Any]] = []
    for name, student in STUDENTS.items():
        for temperature in TEMPERATURES:
            logits, log_q = distributions(student, temperature)
            for divergence in ("reverse", "forward"):
                start = {"student": name, "temperature": temperature, "tokens": len(logits)}
                made += [{**start, **row, **provenance()} for row in measures(logits, log_q, divergence)]
            print(name, temperature, len(logits), "tokens")
            write(made, RESULTS / "topk_bias.csv")


if __name__ == "__main__":
    main()
