"""The memory of one RL step on a real model, with the exact KL: `python benchmarks/bench_step.py MODEL_FOLDER`.

A step is the forward pass of policy and reference over whole completions, a policy gradient plus the sequence-level
exact KL, and the backward pass. `logits` stores the logits of both models, as a trainer that requests logits from its
model does; the others take hidden states. The prediction counts (tokens x vocabulary) buffers: for `logits` those that
torch has at the peak of the backward pass, for the kernels those of their plan.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu import in_turn, rows
from harness import RESULTS, write
from torch import Tensor

from klgrad import KLTerm
from klgrad.kernels import Head, TokenStatistics, fused_statistics, hopper, make_plan, token_statistics

TERM = KLTerm(estimator="exact", discount=0.9, baseline="leave_one_out")
BETA = 0.05


class Step:
    """A policy, a frozen reference, and a batch of completions in groups of 8."""

    def __init__(self, folder: Path, completions: int, length: int) -> None:
        from transformers import AutoModelForCausalLM

        models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for _ in range(2)]
        self.policy: Any = models[0].cuda()
        self.ref: Any = models[1].cuda().requires_grad_(False)
        torch.manual_seed(0)
        with torch.no_grad():
            for p in self.policy.parameters():
                p += 0.01 * p.std() * torch.randn_like(p)
        self.vocabulary = self.policy.config.vocab_size
        self.ids = torch.randint(0, self.vocabulary, (completions, length + 1), device="cuda")
        self.mask = torch.ones(completions, length, device="cuda")
        self.group = torch.arange(completions, device="cuda") // 8
        self.advantages = torch.randn(completions, 1, device="cuda")

    def run(self, statistics: Callable[[], TokenStatistics]) -> None:
        """One step, after which gradients are freed."""
        found = statistics()
        kl = TERM(found.rollout(self.mask, group=self.group))
        (BETA * kl.loss - (self.advantages * found.logp).sum(-1).mean()).backward()
        self.policy.zero_grad(set_to_none=True)

    def logits(self) -> TokenStatistics:
        """Statistics from the full logits of both models, in float32."""
        z = self.policy(self.ids[:, :-1]).logits.float()
        with torch.no_grad():
            z_ref = self.ref(self.ids[:, :-1]).logits.float()
        return fused_statistics.statistics_of_logits(z, self.ids[:, 1:], z_ref)

    def kernels(self, **how: Any) -> TokenStatistics:
        """Statistics from hidden states, by the kernels."""
        hidden = self.policy.model(self.ids[:, :-1]).last_hidden_state
        with torch.no_grad():
            ref_hidden = self.ref.model(self.ids[:, :-1]).last_hidden_state
        return token_statistics(hidden, Head.of(self.policy), self.ids[:, 1:], ref_hidden, Head.of(self.ref), **how)


def predicted(step: Step, name: str) -> float:
    """GiB for the KL and the log-probs, in addition to the activations and gradients of the models."""
    tokens = step.mask.numel()
    if name == "logits":
        # Saved for backward: log p, p, log p - log q and q in float32. Backward needs as many again, and a bf16
        # gradient.
        return tokens * step.vocabulary * (4 * 8 + 2) / 2**30
    plan = make_plan(
        tokens,
        step.vocabulary,
        torch.bfloat16,
        paired=True,
        mode="fast" if "fast" in name else "lean",
        hopper=hopper.runs_on(step.mask.device),
    )
    return (plan.tile_bytes + plan.kept_bytes) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    made: list[dict[str, object]] = []
    for completions, length in ((16, 512), (32, 512), (64, 512)):
        step = Step(given.model, completions, length)
        ways: dict[str, Callable[[], TokenStatistics]] = {
            "logits": step.logits,
            "klgrad lean": step.kernels,
            "klgrad fast": partial(step.kernels, mode="fast"),
        }
        candidates: dict[str, Callable[[], object]] = {"activations alone": partial(_activations, step)}
        candidates |= {name: partial(step.run, way) for name, way in ways.items()}
        found = in_turn(candidates, rounds=5)
        tokens = completions * length
        for row in rows("RL step", found, {}, tokens=tokens, hidden=576, vocabulary=step.vocabulary):
            if row["failure"]:
                continue
            row["predicted_gib"] = f"{predicted(step, str(row['candidate'])):.2f}" if row["candidate"] in ways else ""
            beyond = float(str(row["extra_gib"])) - found["activations alone"].extra_bytes / 2**30
            row["beyond_activations_gib"] = f"{beyond:.2f}"
            print(
                {
                    k: row[k]
                    for k in (
                        "candidate",
                        "tokens",
                        "median_ms",
                        "extra_gib",
                        "beyond_activations_gib",
                        "predicted_gib",
                    )
                }
            )
            made.append(row)
        del step, ways, candidates, found
        torch.cuda.empty_cache()
    write(made, given.out / "step.csv")


def _activations(step: Step) -> None:
    """Forward and backward of the models without any head."""
    hidden: Tensor = step.policy.model(step.ids[:, :-1]).last_hidden_state
    with torch.no_grad():
        step.ref.model(step.ids[:, :-1])
    hidden.float().square().mean().backward()
    step.policy.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
