"""The generated parts of docs/footguns.md: what the audit finds for each wrong and each right loss."""

from collections.abc import Callable
from functools import partial

import torch
from reference.text import audited, table
from torch import Tensor, log_softmax
from torch.nn.functional import kl_div

from klgrad import KLTerm
from klgrad.audit import audit
from klgrad.audit.sentences import summary
from klgrad.frameworks import recorded
from klgrad.zoo import CELLS


def policy_first(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """`kl_div(policy, ref)`."""
    return _kl_div(logits, ref_logits)


def policy_second(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """`kl_div(ref, policy)`."""
    return _kl_div(ref_logits, logits)


def _kl_div(first: Tensor, second: Tensor) -> Tensor:
    one, other = (log_softmax(x, -1) for x in (first, second))
    return kl_div(one, other, log_target=True, reduction="none").sum(-1)


OTHERS = {
    'KLTerm(level="token", influence_bound=5.0)': KLTerm(level="token", influence_bound=5.0),
    "kl_div(policy, ref)": policy_first,
    "kl_div(ref, policy)": policy_second,
}
"""What is neither a loss of the zoo nor a setting of a framework."""

GRPO = "trl grpo loss_type=dr_grpo importance_sampling_level={} use_bias_correction_kl=True"
VERL = "verl use_kl_in_reward kl_penalty=kl adv_estimator={}"

PAIRS = {
    "k1 as a loss": ("k1-loss", "k2-loss"),
    "no grad": ("k3-no-grad", "k2-loss"),
    "k3 as a loss": ("k3-loss", "k2-loss"),
    "k3 in the reward": ("k3-reward", "k1-reward"),
    "divided": (VERL.format("grpo"), VERL.format("rloo")),
    "clamp": ("k3-loss-clamped", 'KLTerm(level="token", influence_bound=5.0)'),
    "broadcast ratio": (GRPO.format("sequence"), GRPO.format("token")),
    "stale": ("k2-loss", "stopped-ratio-k2-loss"),
    "length": ("k2-loss-length-mean", "k2-loss"),
    "order": ("kl_div(policy, ref)", "kl_div(ref, policy)"),
}
"""The wrong and the right loss of each part."""


def parts() -> dict[str, Callable[[], str]]:
    """The generated parts by name."""
    return {name: partial(_pair, *pair) for name, pair in PAIRS.items()}


def _pair(wrong: str, right: str) -> str:
    rows = [(word, _linked(name), *words(name)) for word, name in (("wrong", wrong), ("right", right))]
    return table(("", "", "on fresh samples it descends", "on stale samples"), rows)


def _linked(name: str) -> str:
    return f"[`{name}`](zoo/{name}.md)" if name in CELLS else f"`{name}`"


def words(name: str) -> tuple[str, str]:
    """What a loss descends, on fresh and on stale samples."""
    known = recorded(name.split()[0])
    if known is not None:
        return known.words[name]
    torch.set_num_threads(1)
    result = audit(OTHERS[name]) if name in OTHERS else audited(name)
    return summary(result.anatomy), summary(result.anatomy, on_policy=False)
