"""Faults put into a copy of the package on purpose: each must break a claim."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from some import first

import klgrad

PACKAGE = Path(klgrad.__file__).parent
CHECK = Path(__file__).with_name("broken.py")

MUTATIONS = {
    "wrong sign": (
        "core/rollout.py",
        "return self.logp.detach() - self.ref_logp",
        "return self.ref_logp - self.logp.detach()",
        "reverse-sequence-k1",
    ),
    "wrong sign of the surrogate": (
        "core/result.py",
        "value.mean + reduce",
        "value.mean - reduce",
        "reverse-token-k1",
    ),
    "missing detach": (
        "core/result.py",
        "(rollout.logp - rollout.logp.detach())",
        "(rollout.logp - rollout.logp)",
        "reverse-token-k1",
    ),
    "ratio not detached": (
        "core/importance.py",
        "return rollout.logp.detach() - rollout.sampler_logp",
        "return rollout.logp - rollout.sampler_logp",
        "reverse-token-exact-prefix-ratio",
    ),
    "dropped future": ("core/credit.py", "discount * after, 0)", "0 * after, 0)", "reverse-sequence-k1"),
    "future counts the present twice": (
        "core/credit.py",
        "after[:, :-1] = _scan(x, mask, discount)[:, 1:]",
        "after = _scan(x, mask, discount)",
        "reverse-sequence-k1",
    ),
    "batch-mean baseline": (
        "core/credit.py",
        "return (total - x) / (size - 1)",
        "return total / size",
        "reverse-sequence-k1-loo",
    ),
    "baseline unweighted off-policy": (
        "core/term.py",
        "coefficient - weights.own * credit.leave_one_out",
        "coefficient - credit.leave_one_out",
        "reverse-sequence-k1-loo-prefix-ratio",
    ),
    "exact form without its prefix weight": (
        "core/importance.py",
        "return _bounded_exp(before)",
        "return torch.ones_like(before)",
        "reverse-sequence-exact-prefix-ratio",
    ),
    "token ratio for the prefix": (
        "core/importance.py",
        "exp(running_sum(",
        "exp((",
        "reverse-sequence-k1-prefix-ratio",
    ),
    "k3's slope for the reverse KL": (
        "core/families/reverse.py",
        "Contributions(rollout.log_ratio, None)",
        "Contributions(k3.slope(rollout.log_ratio), None)",
        "reverse-token-k1",
    ),
}


def broken_claims(package: Path, *names: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, str(CHECK), *names], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mutation", first(MUTATIONS, 3))
@pytest.mark.slow
def test_a_fault_breaks_a_claim(mutation, tmp_path):
    file, sound, faulty, name = MUTATIONS[mutation]
    copy = tmp_path / "klgrad"
    shutil.copytree(PACKAGE, copy)
    text = (copy / file).read_text(encoding="utf-8")
    assert text.count(sound) == 1, f"{file} no longer has the line that this fault replaces"
    (copy / file).write_text(text.replace(sound, faulty), encoding="utf-8")
    assert "broken:" in broken_claims(copy, name)


@pytest.mark.slow
def test_the_package_as_it_is_breaks_none():
    assert broken_claims(PACKAGE, *sorted({name for *_, name in MUTATIONS.values()})) == ""
