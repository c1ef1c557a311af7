"""Asynchronous training: stale completions with and without importance weights on the KL.

Shah et al. (A Comedy of Estimators) train with completions that are several updates old, find that a KL stabilises the
training, and leave open which estimator is right there. Here completions are 2 or 10 updates old, with advantages that
are centred in their group and not divided by a standard deviation, and TRL's clipped policy loss, on the task of
`rl_runs.py`. The arms: no KL; k1 and k3 in the reward or as loss, uncorrected, as in the paper; and the sequence-level
reverse KL with prefix or sequence weights, with and without a bound, which is right on old completions (the unbounded
ones exactly). These pair the score of a token with the terms of this and of later tokens, and k1 in the reward with
those of all tokens. With fresh completions every weight is 1 and both have the same expected gradient; the runs with
fresh completions are those of `exp_comedy.py`. k1 as a loss, which is harmless at a lag of 2 and destroys the policy at
10, also has lags between them, with three coefficients. `long` has three times as many updates, for what 60 updates may
be too few to show: the arms that train at a lag of 10, and k1 as a loss with the smallest coefficient.

    python benchmarks/exp_async.py [long] MODEL

Results: src/klgrad/papers/recorded/async.csv and async_long.csv.
"""

import argparse
import itertools
import sys

from experiment import command
from packed import Job
from rl_runs import job, train

UPDATES, LONG_UPDATES = 60, 180
EVERY = 20
RATE = 1e-5
COEF = 0.1
SEEDS = (0, 1, 2)
LAGS = (10, 2)
UNCORRECTED = {
    "none": "",
    "k1-reward": "--kl_cell k1-reward-leave-one-out",
    "k3-reward": "--kl_cell k3-reward-leave-one-out",
    "k1-loss": "--kl_cell k1-loss",
    "k3-loss": "--kl_cell k3-loss",
}
BETWEEN, BETWEEN_COEFFICIENTS, BETWEEN_SEEDS = (6, 4, 8), (0.1, 0.2, 0.05), (0, 1)
"""Lags, coefficients and seeds of k1 as a loss alone."""
LONG = (
    *(("none", 10, 0.0), ("k1-reward", 10, COEF), ("k3-loss", 10, COEF)),
    *(("k1-loss", lag, BETWEEN_COEFFICIENTS[-1]) for lag in BETWEEN),
)
"""Arms, lags and coefficients of the long runs."""
CONTROL = {"k1-unweighted": "--kl_baseline leave_one_out"}
"""The arms with weights, without them: a token is paired with its own and later terms, as there."""
CORRECTED = {
    f"k1-{ratio}-{name}": f"--kl_baseline leave_one_out --kl_ratio {ratio} --kl_ratio_bound {bound}"
    for ratio in ("prefix", "sequence")
    for name, bound in (("bounded", "truncate:2"), ("unbounded", "none"))
}


def jobs(given: argparse.Namespace) -> list[Job]:
    """The oldest completions first, then seed by seed, so that an early end leaves the clearest comparison."""
    arms = UNCORRECTED | CORRECTED | CONTROL
    found = [_job(given, arm, flags, lag, seed) for lag in LAGS for seed in SEEDS for arm, flags in arms.items()]
    return [*found, *between(given)]


def between(given: argparse.Namespace) -> list[Job]:
    """k1 as a loss at lags between those of the other arms."""
    order = itertools.product(BETWEEN_COEFFICIENTS, BETWEEN_SEEDS, BETWEEN)
    return [_job(given, "k1-loss", UNCORRECTED["k1-loss"], lag, seed, coef) for coef, seed, lag in order]


def long(given: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    order = itertools.product(SEEDS, LONG)
    return [_job(given, arm, UNCORRECTED[arm], lag, seed, coef, LONG_UPDATES) for seed, (arm, lag, coef) in order]


def _job(
    given: argparse.Namespace, arm: str, flags: str, lag: int, seed: int, coef: float = COEF, updates: int = UPDATES
) -> Job:
    coef = 0.0 if arm == "none" else coef
    label = {"arm": arm, "lag": lag, "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    own = {"rollout_lag": lag, "rollout_lag_repeats": "true", "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    own |= {"max_steps": updates, "eval_every": EVERY}
    uncorrected = " --rollout_lag_uncorrected true" if arm in UNCORRECTED | CONTROL else ""
    return job(label, flags + uncorrected, given.model, scale_rewards="none", **own)


if __name__ == "__main__":
    is_long = "long" in sys.argv[1:2]
    if is_long:
        del sys.argv[1]
    command(__doc__, long if is_long else jobs, train, "async_long.csv" if is_long else "async.csv")
