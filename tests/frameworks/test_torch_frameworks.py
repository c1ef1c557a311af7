"""What is told about frameworks on pages: the parts of their defaults, each finding, and the playground's settings."""

from dataclasses import replace
from functools import cache

import playground
import pytest
import torch
from docs.choices import DEFAULTS as FIRST_CHOICE, compared, loss_of as loss_of_choice
from oracle import mean_gradient_over_groups
from some import first
from tolerances import EXACT, SINGLE

from klgrad.audit import audit
from klgrad.audit.subject import Subject, expected_gradient
from klgrad.enumeration import autoregressive, target_gradients
from klgrad.frameworks import DEFAULTS, FRAMEWORKS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CUT = 2.6109
"""Where k3 is 10: exp(x) - 1 - x = 10."""

# shares of the divergence and its edges in log π/ref, horizon, ratio, unit
PARTS = {
    "areal": ({"reverse-kl": 1}, (-10, 10), "all", "token", "token-mean"),
    "rlinf": ({"chi-square": 1}, (-11, CUT), "none", "none", "token-mean"),
    "cosmos-rl": ({"forward-kl": 1}, (-CUT, 11), "none", "none", "token-mean"),
    "torchrl": ({"forward-kl": 1}, (None, None), "none", "none", "fixed-length"),
    "axolotl": ({"forward-kl": 1}, (None, None), "none", "none", "token-mean"),
    "llamafactory": ({"forward-kl": 1}, (None, None), "none", "none", "token-mean"),
    "art": ({"reverse-kl": 1}, (None, None), "none", "token", "token-mean"),
    "twinkle": ({"forward-kl": 1}, (None, None), "none", "none", "completion-mean"),
    "easyr1": ({"reverse-kl": 1}, (None, None), "all", "token", "token-mean"),
    "roll": ({"forward-kl": 1}, (-CUT, 11), "none", "none", "completion-mean"),
    "molt": ({"reverse-kl": 1}, (None, None), "all", "token", "token-mean"),
}


def needs(name):
    """Skip where the framework is not installed."""
    if FRAMEWORKS[name].version is None:
        pytest.skip(f"{name} is not installed")


def loss_of(name, setting):
    needs(name)
    (subject,) = (s for s in FRAMEWORKS[name].subjects() if s.name == f"{name} {setting}")
    return subject.loss


def gradient_of(loss, problem, members=1):
    """The expected gradient over the logits of a problem."""
    none = torch.zeros(len(problem.space)).double()
    return expected_gradient(Subject("", "framework", loss), problem, members, none).mean[: problem.logits.numel()]


@pytest.mark.parametrize("name", PARTS)
def test_the_default_has_these_parts(name):
    needs(name)
    (subject,) = (s for s in FRAMEWORKS[name].subjects() if s.name == DEFAULTS[name].subject)
    shares, edges, horizon, ratio, unit = PARTS[name]
    parts = audit(subject).anatomy
    assert parts.proved
    assert parts.shares == pytest.approx(shares, rel=1e-5)
    for found, edge in zip((parts.own.low, parts.own.high), edges, strict=True):
        assert found == (None if edge is None else pytest.approx(edge, abs=0.01))
    assert (parts.horizon.kind, parts.samples.ratio, parts.unit.name) == (horizon, ratio, unit)


def test_the_default_of_miles_ignores_the_reference():
    (subject,) = (s for s in FRAMEWORKS["miles"].subjects() if s.name == DEFAULTS["miles"].subject)
    parts = audit(subject).anatomy
    assert (parts.is_nothing, parts.unit.name) == (True, "completion-mean")


ONE_TOKEN = autoregressive(3, 1, ends=False, seed=5, away_from_ref=0.8).on_policy()


def test_the_fsdp_worker_of_rlinf_descends_half_the_chi_squared_and_that_of_megatron_the_forward_kl():
    logits = ONE_TOKEN.logits.clone().requires_grad_()
    pi, ref = torch.softmax(logits, -1), torch.softmax(ONE_TOKEN.ref_logits, -1)
    (chi_squared,) = torch.autograd.grad((pi.square() / ref).sum() / 2, logits)
    setting = "kl_penalty_type=low_var_kl loss_agg_func=seq-mean-token-sum"
    swapped = gradient_of(loss_of("rlinf", f"actor=fsdp {setting}"), ONE_TOKEN)
    SINGLE.check_vector(swapped, chi_squared.flatten())
    right = gradient_of(loss_of("rlinf", f"actor=megatron {setting}"), ONE_TOKEN)
    SINGLE.check_vector(right, target_gradients(ONE_TOKEN)["forward-kl-token"])
    assert float((swapped - right).norm()) > 0.1 * float(right.norm())


SHORT = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0).on_policy()


def test_without_a_reference_the_kl_of_areal_is_an_entropy_bonus():
    needs("areal")
    from klgrad.frameworks import areal

    def entropy(rollout):
        """The policy gradient of E log π, averaged over the tokens of the batch."""
        kl = (rollout.behavior_logp * rollout.mask).clamp(-10, 10)
        return (kl.flip(-1).cumsum(-1).flip(-1) * rollout.logp * rollout.mask).sum() / rollout.mask.sum()

    loss = areal.in_reward("k1", has_reference=False).loss
    SINGLE.check_vector(gradient_of(loss, SHORT, 2), mean_gradient_over_groups(SHORT, 2, entropy, on_policy=True))
    # of equal lengths, the mean over tokens is the sum up to a factor: minus the entropy of a completion
    fixed = autoregressive(2, 3, ends=False, seed=8, away_from_ref=1.0).on_policy()
    logits = fixed.logits.clone().requires_grad_()
    logp = replace(fixed, logits=logits).logp.sum(-1)
    (slope,) = torch.autograd.grad((logp.exp() * logp).sum(), logits)
    SINGLE.check_vector(3 * gradient_of(loss, fixed), slope.flatten())


def test_the_defaults_are_those_that_the_pages_tell():
    needs("areal")
    needs("axolotl")
    needs("cosmos-rl")
    from klgrad.frameworks import areal, axolotl, functions

    config = areal.modules()["cli_args"]
    actor = config.PPOActorConfig(backend="fsdp:d1")
    assert (actor.kl_ctl, actor.kl_estimator, actor.adv_norm) == (0.1, "k1", None)
    fields = config.TeacherConfig.__dataclass_fields__
    assert (fields["rl_loss_weight"].default, fields["distill_loss_weight"].default) == (1.0, 0.005)
    assert axolotl.modules()["async_trainer"].AsyncGRPOConfig().use_bias_correction_kl is False
    policy = functions.file_of("cosmos-rl", "cosmos_rl.policy.config.__init__").GrpoConfig(type="grpo")
    assert (policy.kl_beta, policy.unbiased_kl_estimate, policy.loss_type) == (0.0, False, "token-mean")


def test_asft_of_llamafactory_adds_this_kl():
    needs("llamafactory")
    from klgrad.frameworks.functions import ASFT_FILE, file_of

    generator = torch.Generator().manual_seed(0)
    logits, ref = (torch.randn(2, 5, 4, generator=generator) for _ in range(2))
    labels = torch.tensor([[-100, 1, 2, 0, -100], [-100, 3, 1, -100, -100]])
    file = file_of("llamafactory", ASFT_FILE)
    asft = lambda alpha: file.asft_loss_func({"logits": logits}, labels, ref, alpha)
    flat = lambda x: x[:, :-1].reshape(-1, 4)
    kl = file._kl_divergence(flat(logits), flat(ref), labels[:, 1:].reshape(-1))
    SINGLE.check(asft(1.0) - asft(0.0), kl)
    SINGLE.check(asft(0.1) - asft(0.0), 0.1 * kl)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_distillation_of_axolotl_on_the_top_k(k):
    """Forward: the KL from the teacher cut to its top k and scaled up to 1. Reverse: without the student's tail."""
    needs("axolotl")
    from klgrad.frameworks import axolotl

    generator = torch.Generator().manual_seed(k)
    student = torch.randn(5, 4, generator=generator).requires_grad_()
    teacher = torch.randn(5, 4, generator=generator)
    top = torch.softmax(teacher, -1).topk(k)
    cut = torch.zeros(5, 4).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    pi = torch.softmax(student, -1)
    (forward,) = torch.autograd.grad(axolotl.kd_loss(student, teacher, 0.0, k=k), student)
    SINGLE.check(forward, pi - cut)
    tail = torch.where(cut > 0, pi * (pi.log() - cut.clamp(min=1e-9).log()), 0).sum()
    (expected,) = torch.autograd.grad(tail, student)
    (reverse,) = torch.autograd.grad(axolotl.kd_loss(student, teacher, 1.0, k=k), student)
    SINGLE.check(reverse, expected)


def test_the_direction_of_torchrl_does_not_matter_where_its_samples_are_those_it_wants():
    """Reverse on samples of the student, forward on those of the teacher: the forward KL, both."""
    setting = "normalize_by_seq_length=False"
    reverse = gradient_of(loss_of("torchrl", f"DistillationLoss kl_direction=reverse {setting}"), ONE_TOKEN)
    EXACT.check_vector(reverse, target_gradients(ONE_TOKEN)["forward-kl-token"])
    of_teacher = replace(ONE_TOKEN, behavior_logits=ONE_TOKEN.ref_logits)
    forward = gradient_of(loss_of("torchrl", f"DistillationLoss kl_direction=forward {setting}"), of_teacher)
    EXACT.check_vector(forward, target_gradients(ONE_TOKEN)["forward-kl-token"])


# The settings that the playground shows are what it says they are, by the audit of the framework itself.

SETTINGS = {entry["subject"]: entry for entry in playground.settings()}


@cache
def subjects(framework):
    return {subject.name: subject for subject in FRAMEWORKS[framework].subjects()}


@pytest.mark.parametrize("name", first(SETTINGS, 3))
def test_a_setting_is_its_choice(name):
    framework = name.split(" ")[0]
    needs(framework)
    choice = FIRST_CHOICE | SETTINGS[name]["choice"]
    found, expected = (
        compared(audit(loss).anatomy.to_dict()) for loss in (subjects(framework)[name], loss_of_choice(choice))
    )
    if choice["place"] == "reward":  # the policy loss multiplies it by a ratio of its own
        found["samples"] = expected["samples"]
    if framework == "openrlhf" and choice["ratio"] == "token":  # in float32 the edge is read to 1%
        (ratio, (kind, low, high)), (_, (_, _, bound)) = found["samples"], expected["samples"]
        assert high == pytest.approx(bound, rel=0.01)
        found["samples"] = (ratio, (kind, low, bound))
    assert rounded(found) == rounded(expected)


def rounded(parts):
    """With edges to two digits: frameworks compute in float32."""
    low, high, below, above = (x if x is None else round(x, 2) for x in parts["flat"])
    return parts | {"flat": (low, high, below, above)}
