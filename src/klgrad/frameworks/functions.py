"""Frameworks whose KL is one function, which is loaded alone: Unsloth, Trinity-RFT, cosmos-rl, LLaMA-Factory, ART.

Each function receives logp, ref_logp, old_logp, the mask and, where it takes them, the advantages of the audit, zero by
default; its coefficient is 1. The packages need a GPU, Ray or more to import, so only the named files are loaded.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

TOKEN_MEAN, SUM = "token-mean", "seq-mean-token-sum"

# Unsloth: `grpo_compute_loss`, the loss of its GRPO trainer, which it generates from TRL's.
#
# Its k3 is TRL's, with log-ratios clamped at 20 and the value at 10, after the ratio that corrects the bias of the
# gradient has been applied. `use_bias_correction_kl` is that of the installed TRL.


def _unsloth() -> list[Subject]:
    """The three kinds of reduction x level of the ratio x bias correction; the default with a KL comes first."""
    ratios = (("token", True), ("token", False), ("sequence", True))
    return [_of_unsloth(kind, *ratio) for kind, ratio in product(("dapo", "grpo", "dr_grpo"), ratios)]


def _of_unsloth(kind: str, level: str, correction: bool) -> Subject:
    loss_fn = file_of("unsloth_zoo", "unsloth_zoo/rl_replacements.py").grpo_compute_loss

    def loss(batch: Batch) -> Tensor:
        return loss_fn(
            batch.ref_logp,
            batch.logp,
            batch.old_logp,
            None,
            batch.mask.long() * 0,
            batch.mask,
            1.0,
            batch.advantages[:, 0],
            loss_type=kind,
            importance_sampling_level=level,
            use_bias_correction_kl=correction,
            num_items_in_batch=batch.mask.sum(),
            max_completion_length=batch.mask.shape[1],
        )[0]

    name = f"unsloth grpo loss_type={kind} importance_sampling_level={level} use_bias_correction_kl={correction}"
    # A mean over the tokens of the batch couples its groups; the other loss types are means over completions.
    return subject("unsloth", name, loss, stacks=kind != "dapo")


UNSLOTH = Framework(
    "unsloth",
    "unsloth_zoo",
    "2026.10.9",
    _unsloth,
    Default(
        "GRPO has beta=0.0, no KL; with beta alone raised, and TRL's use_bias_correction_kl",
        "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    ),
)

# Trinity-RFT: every function of its KL registry, as the loss (`kl_loss_fn`, on by default).
#
# `calculate_kl_loss` reduces by `loss_agg_mode` itself. The registry's functions in the reward (`kl_penalty_fn`, off by
# default) go through verl's advantages: see verl.

TRINITY_FUNCTIONS = {
    "k2": "K2Fn",
    "k1": "K1Fn",
    "k3": "K3Fn",
    "low_var_kl": "LowVarKLFn",
    "abs": "AbsFn",
    "corrected_k3": "CorrectedK3Fn",
}
"""The classes of the registry by their names in a configuration; the default comes first."""


def _trinity() -> list[Subject]:
    """Every function, summed over each completion, and the default with its default reduction."""
    return [_of_trinity("k2", TOKEN_MEAN), *(_of_trinity(name, SUM) for name in TRINITY_FUNCTIONS)]


def _of_trinity(kind: str, reduction: str) -> Subject:
    kl = getattr(trinity_functions(), TRINITY_FUNCTIONS[kind])(kl_coef=1.0)

    def loss(batch: Batch) -> Tensor:
        return kl.calculate_kl_loss(batch.logp, batch.ref_logp, batch.mask, reduction, batch.old_logp)[0]

    name = f"trinity kl_loss_fn={kind} loss_agg_mode={reduction}"
    return subject("trinity", name, loss, stacks=reduction != TOKEN_MEAN)


@cache
def trinity_functions() -> ModuleType:
    """The file with the classes of the registry."""
    utils = file_of("trinity-rft", "trinity/algorithm/utils.py")
    path = "trinity/algorithm/kl_fn/kl_fn.py"
    return load("trinity-rft", path, replaced=("trinity",), loaded={"trinity.algorithm.utils": utils})


TRINITY = Framework(
    "trinity",
    "trinity-rft",
    "0.6.0",
    _trinity,
    Default("k2 as a loss, kl_coef=0.001", f"trinity kl_loss_fn=k2 loss_agg_mode={TOKEN_MEAN}"),
)

# cosmos-rl: `compute_loss` of its GRPO trainer, with the KL in the loss (`train_policy.kl_beta`).
#
# The function receives the live tokens of all completions in one row; the settings are those of its own `GrpoConfig`.


def _cosmos_rl() -> list[Subject]:
    """The kinds of reduction, without and with the ratio; the default with a KL comes first."""
    kinds = (TOKEN_MEAN, "seq-mean-token-mean", SUM)
    return [_of_cosmos_rl(kind, unbiased) for kind, unbiased in product(kinds, (False, True))]


def _of_cosmos_rl(kind: str, unbiased: bool) -> Subject:
    settings = {"type": "grpo", "loss_type": kind, "unbiased_kl_estimate": unbiased, "kl_beta": 1.0}
    policy = file_of("cosmos-rl", "cosmos_rl/policy/config/__init__.py").GrpoConfig(**settings)
    config = SimpleNamespace(train=SimpleNamespace(train_policy=policy))
    compute = file_of("cosmos-rl", "cosmos_rl/policy/trainer/llm_trainer/grpo_trainer.py").compute_loss

    def loss(batch: Batch) -> Tensor:
        from torch.nn.functional import pad

        mask = batch.mask
        ends = pad(mask.sum(-1).cumsum(0), (1, 0))
        rows = (batch.logp[mask], batch.old_logp[mask], batch.ref_logp[mask])
        return compute(*rows, batch.advantages, ends, config, mask)[0]

    name = f"cosmos-rl kl_beta loss_type={kind} unbiased_kl_estimate={unbiased}"
    return subject("cosmos-rl", name, loss, stacks=kind != TOKEN_MEAN)


COSMOS_RL = Framework(
    "cosmos-rl",
    "cosmos-rl",
    "0.4.7",
    _cosmos_rl,
    Default(
        "kl_beta=0, no KL; with kl_beta alone raised",
        f"cosmos-rl kl_beta loss_type={TOKEN_MEAN} unbiased_kl_estimate=False",
    ),
)

# LLaMA-Factory: the KL of its ASFT loss (`use_asft_loss`), by its own `_kl_divergence`.
#
# The function receives the logits of the policy and of the reference, and the tokens as labels; `asft_loss_func` adds
# `asft_alpha` times it to a loss of fine-tuning. Its prefixes are then those of a data set, where the audit's are those
# of π or of another sampler.

ASFT = "llamafactory use_asft_loss asft_alpha"
ASFT_FILE = "llamafactory/train/trainer_utils.py"
IGNORED = -100
"""The label of tokens that have no loss."""


def _llamafactory() -> list[Subject]:
    """The KL of ASFT, a mean over the tokens of the batch."""
    kl = file_of("llamafactory", ASFT_FILE)._kl_divergence
    flat = lambda logits: logits.flatten(0, 1)

    def loss(batch: Batch) -> Tensor:
        labels = batch.tokens.where(batch.mask, IGNORED).flatten()
        return kl(flat(batch.logits), flat(batch.ref_logits), labels)

    return [subject("llamafactory", ASFT, loss)]


LLAMAFACTORY = Framework(
    "llamafactory", "llamafactory", "0.9.5", _llamafactory, Default("no KL; with use_asft_loss, asft_alpha=0.1", ASFT)
)

# OpenPipe ART: the KL in the advantages of its `loss_fn` (`kl_penalty_coef`).
#
# The log-ratio to the reference, of the policy (`kl_penalty_source=current_learner`, the default) or of the samples,
# less its mean over the tokens of the batch, lowers the advantage of its token. The policy loss weights log-probs by
# the ratio π/π_old, truncated at 5 (CISPO); with `ppo` it clips.


def _art() -> list[Subject]:
    """Both sources of the log-ratio, and both policy losses, averaged over tokens; then the default summed."""
    sources = ("current_learner", "sample")
    default = _of_art("current_learner", False, "sum")
    return [*(_of_art(source, ppo, "mean") for ppo, source in product((False, True), sources)), default]


def _of_art(source: str, ppo: bool, reduction: str) -> Subject:
    config = {"kl_penalty_coef": 1.0, "kl_penalty_source": source, "ppo": ppo}
    file = file_of("openpipe-art", "art/loss.py")

    def loss(batch: Batch) -> Tensor:
        inputs = file.AlignedLossInputs(
            assistant_mask=batch.mask,
            old_logprobs=batch.old_logp,
            advantages=batch.advantages,
            weights=batch.advantages.new_ones(batch.mask.shape),
            group_ids=batch.group[:, None].expand(batch.mask.shape),
        )
        return file.loss_fn(inputs, batch.logp, batch.ref_logp, None, config, reduction).policy_loss

    name = f"art kl_penalty_coef kl_penalty_source={source} ppo={ppo} reduction={reduction}"
    return subject("art", name, loss)


ART = Framework(
    "art",
    "openpipe-art",
    "0.5.23",
    _art,
    Default(
        "no KL; with kl_penalty_coef alone raised",
        "art kl_penalty_coef kl_penalty_source=current_learner ppo=False reduction=mean",
    ),
)


@cache
def file_of(distribution: str, path: str) -> ModuleType:
    """A file of a package, without the rest of it."""
    own, package = path.partition("/")[0], path.rpartition("/")[0].replace("/", ".")
    return load(
        distribution, path, stand_ins=("toml", "msgpack"), replaced=(own, "transformers", "ray"), package=package
    )
