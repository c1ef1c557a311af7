"""How often intervals contain the true KL, over thousands of simulated batches; run it to print the table of the docs.

There are 64 prompts, each a small random problem whose KL is known by summing over every completion. A batch draws
prompts, and completions of each prompt. The policy has ref's logits plus noise ("near"), or 3 times ref's logits
("sharp"): then tokens that it hardly ever draws are likely under ref, which gives k3 its heavy tail.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from oracle import whole_space

from klgrad import ImportanceWeighting, KLTerm
from klgrad.core.result import Estimate, RatioSums
from klgrad.enumeration import autoregressive

BATCHES, PROMPTS = 4000, 64
NORMAL = 1.959964
PREFIX = ImportanceWeighting("prefix", bound=None)
TERMS = {
    "k1": KLTerm(),
    "k3": KLTerm(estimator="k1_k3"),  # whose value is k3
    "exact": KLTerm(estimator="exact"),
    "k1, off-policy by the prefix ratio": KLTerm(weighting=PREFIX),
    "exact, off-policy by the prefix ratio": KLTerm(estimator="exact", weighting=PREFIX),
}
GROUPS = {
    "16 prompts x 8": [8] * 16,
    "64 prompts x 4": [4] * 64,
    "16 prompts, 1 to 8 each": [1, 2, 3, 4, 5, 6, 7, 8] * 2,
    "4 prompts x 8": [8] * 4,
}
UNITS = ("per_sequence", "per_token")


class Population(NamedTuple):
    """(prompts, completions): the KL estimate of a completion, its length and its probability."""

    value: torch.Tensor
    length: torch.Tensor
    probability: torch.Tensor


@cache
def population(term, policy):
    rows = []
    for seed in range(PROMPTS):
        problem = autoregressive(3, 3, ends=True, seed=seed, away_from_ref=0.5)
        if policy == "sharp":
            mu = 3 * problem.behavior_logits
            problem = replace(problem, logits=3 * problem.logits, behavior_logits=mu, ref_logits=problem.logits)
        problem = problem if term.weighting else problem.on_policy()
        everything = whole_space(problem)
        rows.append((term(everything)._value_per_sequence, everything.lengths, problem.probability))
    return Population(*map(torch.stack, zip(*rows, strict=True)))


def batches(term, sizes, unit, policy, seed=0):
    """(batches, prompts) totals and counts, and the ratio that they estimate."""
    every = population(term, policy)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, PROMPTS, (BATCHES, len(sizes)), generator=generator)
    chances = every.probability[prompt].flatten(0, 1)
    drawn = torch.multinomial(chances, max(sizes), replacement=True, generator=generator).view(*prompt.shape, -1)
    there = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    of_group = lambda x: torch.where(there, x[prompt[..., None], drawn], 0).sum(-1)
    unit_count = every.length if unit == "per_token" else torch.ones_like(every.length)
    truth = (every.probability * every.value).sum() / (every.probability * unit_count).sum()
    return of_group(every.value), of_group(unit_count), float(truth)


def shares_covered(term, sizes, unit, policy="near"):
    """Of `Estimate.interval()`, and of the mean ± 1.96 standard errors."""
    total, count, truth = batches(term, sizes, unit, policy)

    def numbers(total, count):
        (found,) = RatioSums.of(total[None], count).estimates()
        return torch.stack([found.mean, found.standard_error, found.degrees_of_freedom])

    student = normal = 0
    for mean, error, freedom in torch.vmap(numbers)(total, count).tolist():  # an interval takes plain floats as well
        low, high = Estimate(mean, error, len(sizes), freedom).interval()
        student += low <= truth <= high
        normal += abs(mean - truth) <= NORMAL * error
    return student / BATCHES, normal / BATCHES


if __name__ == "__main__":
    print("| policy | estimate | groups | per sequence | per token |\n|---|---|---|---|---|")
    for policy in ("near", "sharp"):
        for name, term in TERMS.items():
            for groups, sizes in GROUPS.items():
                cells = ["{:.3f} ({:.3f})".format(*shares_covered(term, sizes, unit, policy)) for unit in UNITS]
                print(f"| {policy} | {name} | {groups} | {' | '.join(cells)} |")
