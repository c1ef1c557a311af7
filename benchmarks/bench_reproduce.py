"""Compare batched tabular experiments with a plain loop: `python benchmarks/bench_reproduce.py`.

The plain loop follows the protocol directly: one problem and one method at a time, with the loss differentiated by
autograd. `klgrad reproduce` uses the batched version. Both do the same steps on the same number of problems. The time
of the whole command, in full and with `--quick`, is measured too.
"""

import subprocess
import sys
import tempfile

import torch
from harness import rows, save, side_by_side

from klgrad.core.estimators import k1, k2, k3
from klgrad.papers.tang_munos import bandits

METHODS = ["k1-reward", "k1-reward-leave-one-out", "k2-loss", "k1-loss", "k3-loss"]
REPEATS, STEPS, SAMPLES = 20, 20, 4


def batched() -> torch.Tensor:
    """All methods and problems in one tensor."""
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(REPEATS, generator, torch.float32)
    logits = problems.logits.expand(len(METHODS), -1, -1).clone()
    for _ in range(STEPS):
        logp = torch.log_softmax(logits, -1)
        p = logp.exp()
        counts = bandits.count(p, SAMPLES, generator)
        logits = logits - bandits.estimated_gradients(METHODS, logp - problems.ref_logp, counts, p)
    return logits


def plain_loop() -> torch.Tensor:
    """One problem and one method at a time, with autograd."""
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(REPEATS, generator, torch.float32)
    return torch.stack(
        [torch.stack([_descend(problems, r, method, generator) for r in range(REPEATS)]) for method in METHODS]
    )


def _descend(problems: bandits.Bandits, r: int, method: str, generator: torch.Generator) -> torch.Tensor:
    logits = problems.logits[r].clone()
    for _ in range(STEPS):
        logits = logits.detach().requires_grad_()
        logp = torch.log_softmax(logits, -1)
        arms = torch.multinomial(logp.detach().exp(), SAMPLES, replacement=True, generator=generator)
        loss = _loss(method, logp[arms], problems.ref_logp[r, arms])
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = logits - gradient
    return logits.detach()


def _loss(method: str, logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    log_ratio = logp - ref_logp
    as_loss = {"k1-loss": k1, "k2-loss": k2, "k3-loss": k3}
    if method in as_loss:
        return as_loss[method](log_ratio).mean()
    weight = log_ratio.detach()
    if method == "k1-reward-leave-one-out":
        weight = weight - (weight.sum() - weight) / (SAMPLES - 1)
    return (weight * logp).mean()


def command(*options: str) -> None:
    """The whole command, into an empty folder."""
    with tempfile.TemporaryDirectory() as out:
        run = [sys.executable, "-m", "klgrad", "reproduce", "--out", out, *options]
        status = subprocess.run(run, check=False, capture_output=True).returncode
        assert status in (0, 1), status  # 1 says that a claim is contradicted


if __name__ == "__main__":
    torch.set_num_threads(1)
    seconds = side_by_side({"plain loop": plain_loop, "batched": batched}, rounds=5)
    found = rows("tabular descent", seconds, "plain loop")
    whole = side_by_side({"full": command, "--quick": lambda: command("--quick")}, rounds=2)
    save([*found, *rows("klgrad reproduce", whole, "full")], "reproduce.csv")
