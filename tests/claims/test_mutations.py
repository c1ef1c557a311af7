"""Faults put into a copy of the package on purpose: each must break a claim."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import PACKAGE, copy_with_fault
from some import first

CHECK = Path(__file__).with_name("broken.py")

MUTATIONS = {
    "wrong sign": (
        "rollout.Rollout.log_ratio", "return self.logp.detach() - self.ref_logp",
        "return self.ref_logp - self.logp.detach()", "reverse-sequence-k1"),
    "wrong sign of the surrogate": (
        "result.KLResult.loss", "value.mean + reduce", "value.mean - reduce", "reverse-token-k1"),
    "missing detach": (
        "result.assemble", "(rollout.logp - rollout.logp.detach())", "(rollout.logp - rollout.logp)",
        "reverse-token-k1"),
    "ratio not detached": (
        "importance._log_token_ratio", "return rollout.logp.detach() - rollout.sampler_logp",
        "return rollout.logp - rollout.sampler_logp", "reverse-token-exact-prefix-ratio"),
    "dropped future": ("credit.future", "discount * after, 0)", "0 * after, 0)", "reverse-sequence-k1"),
    "future counts the present twice": (
        "credit.future", "after[:, :-1] = _scan(x, mask, discount)[:, 1:]", "after = _scan(x, mask, discount)",
        "reverse-sequence-k1"),
    "batch-mean baseline": (
        "credit.leave_one_out", "return (total - x) / (size - 1)", "return total / size", "reverse-sequence-k1-loo"),
    "baseline unweighted off-policy": (
        "families.evaluate", "coefficient - weights.own * credit.leave_one_out",
        "coefficient - credit.leave_one_out", "reverse-sequence-k1-loo-prefix-ratio"),
    "exact form without its prefix weight": (
        "importance.ImportanceWeighting.weights", "self._bounded(_bounded_exp(before))", "torch.ones_like(before)",
        "reverse-sequence-exact-prefix-ratio"),
    "token ratio for the prefix": (
        "importance.prefix_ratio", "exp(running_sum(", "exp((", "reverse-sequence-k1-prefix-ratio"),
    "k3's slope for the reverse KL": (
        "divergences.alpha", "lambda log_ratio: log_ratio, k3.value", "k3.slope, k3.value", "reverse-token-k1"),
}  # fmt: skip


def broken_claims(package: Path, *names: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, str(CHECK), *names], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mutation", first(MUTATIONS, 2))
@pytest.mark.slow
def test_a_fault_breaks_a_claim(mutation, tmp_path):
    where, sound, faulty, name = MUTATIONS[mutation]
    copy = copy_with_fault(tmp_path, fault=(f"klgrad.core.{where}", sound, faulty))
    assert "broken:" in broken_claims(copy, name)


@pytest.mark.slow
def test_the_package_as_it_is_breaks_none():
    assert broken_claims(PACKAGE, *sorted({name for *_, name in MUTATIONS.values()})) == ""
