"""Each transcribed formula against its coefficient on ∇log π, differentiated by hand."""

import math
from dataclasses import replace

import pytest
import torch
from framework_verdicts import TRANSCRIBED
from tolerances import EXACT

from klgrad.audit.probes import from_problem
from klgrad.enumeration import autoregressive
from klgrad.frameworks import FRAMEWORKS


def batch():
    """Log-ratios to ref from -12 to 50, to the sampler up to ±1.5; four completions, 2 to 5 tokens long.

    None is below -12: there k3 and its slope, of size exp(-l), cancel to l with an error that float64 does not hide.
    """
    random = torch.Generator().manual_seed(4)
    uniform = lambda: 2 * torch.rand(4, 5, generator=random, dtype=torch.float64) - 1
    per_row = lambda *values: torch.tensor(values, dtype=torch.float64)[:, None]
    away = (uniform() * per_row(50, 12, 3, 1)).clamp(min=-12)
    # Deep enough that no log-prob is positive; the last completion has probabilities near 1, which can fall by 0.2.
    logp = away.clamp(max=0) - per_row(12, 12, 3, 0) - 0.1
    ref_logp = logp - away
    behavior = (logp + 1.5 * uniform()).clamp(max=-0.01)
    mask = torch.arange(5) < torch.tensor([[5], [3], [2], [4]])
    found = from_problem(
        autoregressive(2, 5, ends=True, seed=0, away_from_ref=1.0),
        torch.tensor([[0, 1], [2, 3]]),
        torch.zeros(6).double(),
    )
    tensors = {"logp": logp, "ref_logp": ref_logp, "old_logp": behavior, "behavior_logp": behavior, "mask": mask}
    return replace(found, **tensors, advantages=per_row(0.5, -1.0, 2.0, -0.25).expand(4, 5)).fresh()


def clipped(cost, w, low, high, dual=math.inf):
    """The coefficient of PPO's loss for a cost: 0 where the clip takes over."""
    outside = ((cost < 0) & (w > 1 + high)) | ((cost > 0) & ((w < 1 - low) | (w > dual)))
    return cost * w * ~outside


class By:
    """The quantities of each token that the coefficients are made of."""

    def __init__(self, b):
        self.l = (b.logp - b.ref_logp).detach()
        self.log_w = (b.logp - b.behavior_logp).detach()
        self.w = self.log_w.exp()
        self.forward = 1 - (-self.l).exp()
        self.within_40 = (self.l.abs() < 40).double()
        self.k3 = (-self.l).exp() + self.l - 1
        self.advantages = b.advantages
        self.moved = b.logp.detach().exp() - b.behavior_logp.exp()
        self.at_sampler = torch.where(b.mask, b.behavior_logp - b.ref_logp, 0)
        self.centred = torch.where(b.mask, self.at_sampler - self.at_sampler.sum() / b.mask.sum(), 0)
        self.mask = b.mask
        self.k3_at_sampler = torch.where(b.mask, (-self.at_sampler).exp() + self.at_sampler - 1, 0)

    def ppo(self, cost, low=0.2, high=0.2, dual=math.inf):
        return clipped(cost, self.w, low, high, dual)

    def whitened(self, cost):
        live = cost[self.mask]
        return self.ppo((cost - live.mean()) / live.std())

    def grouped(self, per_token, divided):
        """What EasyR1 has for a group of two completions: the difference, or its sign by the deviation."""
        first, second, third, fourth = per_token.sum(-1)
        differences = torch.stack([first - second, second - first, third - fourth, fourth - third])
        standard = differences.sign() / math.sqrt(2)
        return self.ppo((standard if divided else differences)[:, None].expand_as(self.w), 0.2, 0.3, 3.0)


def to_go(x):
    return x.flip(-1).cumsum(-1).flip(-1)


K3 = "reference_policy_kl_type=k3 token_level_loss="
SAMPLER = f"{K3}True use_on_policy_kl_approximation=True"
KL = "--use-kl-loss --kl-loss-type "
UNBIASED = " --use-unbiased-kl"
# (how the coefficients are averaged, the coefficient)
COEFFICIENTS = {
    "nemo-rl": {
        f"{K3}True": ("tokens", lambda b: b.l * (b.k3 < 10)),
        f"{K3}False": ("completions", lambda b: b.l * (b.k3 < 10)),
        "reference_policy_kl_type=k1 token_level_loss=True": ("tokens", lambda b: (b.l + 1) * (b.l.abs() < 10)),
        "reference_policy_kl_type=k2 token_level_loss=True": (
            "tokens",
            lambda b: (b.l**2 / 2 + b.l) * (b.l**2 / 2 < 10),
        ),
        SAMPLER: ("tokens", lambda b: b.w * b.l * (b.w * b.k3 < 10) * (b.l.abs() < 20)),
        f"{SAMPLER} kl_output_clamp_value=null": ("tokens", lambda b: b.w * b.l * (b.l.abs() < 20)),
    },
    "prime-rl": {
        "trainer.loss.type=default kl_tau": ("tokens", lambda b: 2 * b.log_w),
        "algorithm=opd": ("tokens", lambda b: b.w * b.l * (b.moved >= -0.2) + 2e-3 * b.log_w),
    },
    "slime": {
        f"{KL}k1": ("completions", lambda b: torch.ones_like(b.l)),
        f"{KL}k1{UNBIASED}": ("completions", lambda b: b.w * (b.l + 1)),
        f"{KL}k2": ("completions", lambda b: b.l),
        f"{KL}k2{UNBIASED}": ("completions", lambda b: b.w * (b.l**2 / 2 + b.l)),
        f"{KL}k3": ("completions", lambda b: b.forward),
        f"{KL}k3{UNBIASED}": ("completions", lambda b: b.w * b.l),
        f"{KL}low_var_kl": ("completions", lambda b: b.forward * (b.k3 < 10)),
        f"{KL}low_var_kl{UNBIASED}": ("completions", lambda b: b.w * b.l * (b.w * b.k3 < 10)),
        f"{KL}k3{UNBIASED} --calculate-per-token-loss": ("tokens", lambda b: b.w * b.l),
        "--kl-coef --advantage-estimator grpo": ("sum", lambda b: -b.advantages * b.w),
    },
    "open-instruct": {
        f"kl_estimator={number} loss_denominator={denominator}": (reduction, coefficient)
        for denominator, reduction in (("token", "tokens"), ("N", "sum"))
        for number, coefficient in enumerate(
            (
                lambda b: 1 * b.within_40,
                lambda b: b.l * b.within_40,
                lambda b: b.forward * b.within_40,
                lambda b: b.w * (b.l.clamp(-40, 40) + b.within_40),
            )
        )
    },
    "tinker-cookbook": {
        "rl kl_penalty_coef kl_discount_factor=0.0": ("sum", lambda b: b.w * b.centred),
        "rl kl_penalty_coef kl_discount_factor=1.0": ("sum", lambda b: b.w * to_go(b.centred)),
        "distillation kl_penalty_coef kl_discount_factor=0.0": ("sum", lambda b: b.w * b.at_sampler),
        "distillation kl_penalty_coef kl_discount_factor=1.0": ("sum", lambda b: b.w * to_go(b.at_sampler)),
    },
    "easyr1": {
        "kl_penalty=kl adv_estimator=grpo": ("tokens", lambda b: b.grouped(b.at_sampler, True)),
        "kl_penalty=kl adv_estimator=rloo": ("tokens", lambda b: b.grouped(b.at_sampler, False)),
        "kl_penalty=low_var_kl adv_estimator=rloo": (
            "tokens",
            lambda b: b.grouped(torch.where(b.at_sampler > 20, 10, b.k3_at_sampler.clamp(max=10)), False),
        ),
        "use_kl_loss kl_penalty=kl": ("tokens", lambda b: torch.ones_like(b.l)),
        "use_kl_loss kl_penalty=mse": ("tokens", lambda b: b.l),
        "use_kl_loss kl_penalty=low_var_kl": ("tokens", lambda b: b.forward * (b.k3 < 10)),
    },
    "roll": {
        "use_kl_loss loss_agg_mode=seq-mean-token-mean": ("completions", lambda b: b.forward * (b.k3 < 10)),
        "use_kl_loss loss_agg_mode=token-mean": ("tokens", lambda b: b.forward * (b.k3 < 10)),
        "use_kl_loss loss_agg_mode=seq-mean-token-sum": ("sum", lambda b: b.forward * (b.k3 < 10)),
        "add_token_level_kl kl_penalty=kl adv_estimator=gae": (
            "completions",
            lambda b: b.ppo(sum(0.95**k * torch.nn.functional.pad(b.at_sampler, (0, k))[:, k:] for k in range(5))),
        ),
        "add_token_level_kl kl_penalty=kl adv_estimator=reinforce": (
            "completions",
            lambda b: b.ppo(to_go(b.at_sampler)),
        ),
        "is_pure_opd kl_penalty=kl": ("completions", lambda b: b.ppo(b.at_sampler)),
    },
    "molt": {
        "algo.kl in reward estimator=k1 advantage=reinforce": ("tokens", lambda b: b.whitened(to_go(b.at_sampler))),
        "algo.kl in reward estimator=k1 advantage=reinforce no_whiten": (
            "tokens",
            lambda b: b.ppo(to_go(b.at_sampler)),
        ),
        "algo.kl in reward advantage=on_policy_distill": ("tokens", lambda b: b.ppo(b.at_sampler)),
        "algo.kl.use_loss estimator=k1": ("tokens", lambda b: torch.ones_like(b.l)),
        "algo.kl.use_loss estimator=k2": ("tokens", lambda b: b.l * (b.l**2 / 2 < 10)),
        "algo.kl.use_loss estimator=k3": ("tokens", lambda b: b.forward * (b.k3 < 10)),
    },
}
REWARD = "use_kl_in_reward adv_estimator=reinforce_plus_plus reference_policy_kl_type="
COEFFICIENTS["nemo-rl"] |= {
    f"{REWARD}k3": ("tokens", lambda b: b.whitened(b.k3_at_sampler.clamp(max=10))),
    f"{REWARD}k1": ("tokens", lambda b: b.whitened(b.at_sampler.clamp(-10, 10))),
}
# miles bounds the log-ratio of low_var_kl at 20, where its value is above 10 anyway.
BY_PPO = "--advantage-estimator reinforce_plus_plus"
COEFFICIENTS["miles"] = COEFFICIENTS["slime"] | {
    f"--kl-coef --kl-loss-type k1 {BY_PPO}": ("completions", lambda b: b.ppo(to_go(b.at_sampler))),
    f"--kl-coef --kl-loss-type k3 {BY_PPO}": ("completions", lambda b: b.ppo(to_go(b.k3_at_sampler))),
    "--use-opd": ("completions", lambda b: b.ppo(b.at_sampler)),
}
CASES = [(name, setting) for name, settings in COEFFICIENTS.items() for setting in settings]


def averaged(coefficient, mask, reduction):
    share = {"tokens": mask.sum(), "completions": len(mask) * mask.sum(-1, keepdim=True), "sum": len(mask)}[reduction]
    return coefficient * mask / share


@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_the_gradient_has_the_coefficients_found_by_hand(name, setting):
    b, (reduction, coefficient) = batch(), COEFFICIENTS[name][setting]
    (loss,) = (s(b) for s in FRAMEWORKS[name].subjects() if s.name == f"{name} {setting}")
    (found,) = torch.autograd.grad(loss, b.logp)
    EXACT.check_vector(found, averaged(coefficient(By(b)), b.mask, reduction))


def test_every_bound_is_passed_by_some_tokens_and_not_by_others():
    b, live = By(batch()), batch().mask
    outside = (
        b.k3 >= 10,
        b.w * b.k3 >= 10,
        b.l.abs() >= 10,
        b.l**2 / 2 >= 10,
        b.l.abs() >= 20,
        b.moved < -0.2,
        b.within_40 == 0,
    )
    for passed in outside:
        assert 0 < int(passed[live].sum()) < int(live.sum())


def test_a_transcription_says_of_what_and_is_audited_without_an_installation():
    transcribed = {name: framework for name, framework in FRAMEWORKS.items() if framework.transcribed}
    assert set(transcribed) == set(TRANSCRIBED)
    for name, framework in transcribed.items():
        read = f"formulae transcribed from {framework.distribution}, not its own code"
        assert (framework.version, framework.remark) == (framework.tested, "")
        assert framework.title == f"{name} {framework.version}: {read}"
        assert {s.framework for s in framework.subjects()} == {name}
