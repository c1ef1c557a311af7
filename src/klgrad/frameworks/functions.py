"""Frameworks whose KL is one function or two, which are called alone.

Unsloth, Trinity-RFT, cosmos-rl, LLaMA-Factory, ART, Liger-Kernel, TorchRL, twinkle-kit, MLX-LM-LoRA and mlx-tune. Each
function receives logp, ref_logp, old_logp, the mask and, where it takes them, the advantages of the audit, zero by
default; its coefficient is 1. The packages need a GPU, Ray or more to import, so only the named files are loaded, but
for Liger.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Framework
from .harness import bare, load, named, of_arrays, subject

if TYPE_CHECKING:
    from .harness import Batch, Subject, Tensor

TOKEN_MEAN, SUM = "token-mean", "seq-mean-token-sum"
STAND_INS = ("toml", "msgpack", "mlx_lm", "tqdm", "numpy")
IGNORED = -100
"""The label of tokens that have no loss."""


@cache
def file_of(distribution: str, name: str) -> ModuleType:
    """A file of a package, without the rest of it."""
    replaced = (name.partition(".")[0], "transformers", "ray")
    (module,) = load(distribution, name, stand_ins=STAND_INS, replaced=replaced).values()
    return module


# Unsloth: `grpo_compute_loss`, the loss of its GRPO trainer, which it generates from TRL's.
#
# Its k3 is TRL's, with log-ratios clamped at 20 and the value at 10, after the ratio that corrects the bias of the
# gradient has been applied. `use_bias_correction_kl` is that of the installed TRL.


def _unsloth() -> list[Subject]:
    """The three kinds of reduction x level of the ratio x bias correction; the default with a KL comes first."""
    ratios = (("token", True), ("token", False), ("sequence", True))
    return [_of_unsloth(kind, *ratio) for kind, ratio in product(("dapo", "grpo", "dr_grpo"), ratios)]


def _of_unsloth(kind: str, level: str, correction: bool) -> Subject:
    loss_fn = file_of("unsloth_zoo", "unsloth_zoo.rl_replacements").grpo_compute_loss
    settings = {"loss_type": kind, "importance_sampling_level": level, "use_bias_correction_kl": correction}

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
            **settings,
            num_items_in_batch=batch.mask.sum(),
            max_completion_length=batch.mask.shape[1],
        )[0]

    # A mean over the tokens of the batch couples its groups; the other loss types are means over completions.
    return subject(named("unsloth grpo", settings), loss)


UNSLOTH = Framework.of("unsloth", _unsloth)

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

    return subject(f"trinity kl_loss_fn={kind} loss_agg_mode={reduction}", loss)


@cache
def trinity_functions() -> ModuleType:
    """The file with the classes of the registry."""
    names = ("trinity.algorithm.utils", "trinity.algorithm.kl_fn.kl_fn")
    return load("trinity-rft", *names, replaced=("trinity", "transformers", "ray"))["kl_fn"]


TRINITY = Framework.of("trinity", _trinity)

# cosmos-rl: `compute_loss` of its GRPO trainer, with the KL in the loss (`train_policy.kl_beta`).
#
# The function receives the live tokens of all completions in one row; the settings are those of its own `GrpoConfig`.


def _cosmos_rl() -> list[Subject]:
    """The kinds of reduction, without and with the ratio; the default with a KL comes first."""
    kinds = (TOKEN_MEAN, "seq-mean-token-mean", SUM)
    return [_of_cosmos_rl(kind, unbiased) for kind, unbiased in product(kinds, (False, True))]


def _of_cosmos_rl(kind: str, unbiased: bool) -> Subject:
    settings = {"type": "grpo", "loss_type": kind, "unbiased_kl_estimate": unbiased, "kl_beta": 1.0}
    policy = file_of("cosmos-rl", "cosmos_rl.policy.config.__init__").GrpoConfig(**settings)
    config = SimpleNamespace(train=SimpleNamespace(train_policy=policy))
    compute = file_of("cosmos-rl", "cosmos_rl.policy.trainer.llm_trainer.grpo_trainer").compute_loss

    def loss(batch: Batch) -> Tensor:
        from torch.nn.functional import pad

        mask = batch.mask
        ends = pad(mask.sum(-1).cumsum(0), (1, 0))
        rows = (batch.logp[mask], batch.old_logp[mask], batch.ref_logp[mask])
        return compute(*rows, batch.advantages, ends, config, mask)[0]

    return subject(f"cosmos-rl kl_beta loss_type={kind} unbiased_kl_estimate={unbiased}", loss)


COSMOS_RL = Framework.of("cosmos-rl", _cosmos_rl)

# LLaMA-Factory: the KL of its ASFT loss (`use_asft_loss`), by its own `_kl_divergence`.
#
# The function receives the logits of the policy and of the reference, and the tokens as labels; `asft_loss_func` adds
# `asft_alpha` times it to a loss of fine-tuning. Its prefixes are then those of a data set, where the audit's are those
# of π or of another sampler.

ASFT = "llamafactory use_asft_loss asft_alpha"
ASFT_FILE = "llamafactory.train.trainer_utils"


def _llamafactory() -> list[Subject]:
    """The KL of ASFT, a mean over the tokens of the batch."""
    kl = file_of("llamafactory", ASFT_FILE)._kl_divergence
    flat = lambda logits: logits.flatten(0, 1)

    def loss(batch: Batch) -> Tensor:
        labels = batch.tokens.where(batch.mask, IGNORED).flatten()
        return kl(flat(batch.logits), flat(batch.ref_logits), labels)

    return [subject(ASFT, loss)]


LLAMAFACTORY = Framework.of("llamafactory", _llamafactory)

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
    config = {"kl_penalty_source": source, "ppo": ppo}
    file = file_of("openpipe-art", "art.loss")

    def loss(batch: Batch) -> Tensor:
        inputs = file.AlignedLossInputs(
            assistant_mask=batch.mask,
            old_logprobs=batch.old_logp,
            advantages=batch.advantages,
            weights=batch.advantages.new_ones(batch.mask.shape),
            group_ids=batch.group[:, None].expand(batch.mask.shape),
        )
        settings = {"kl_penalty_coef": 1.0, **config}
        return file.loss_fn(inputs, batch.logp, batch.ref_logp, None, settings, reduction).policy_loss

    return subject(named("art kl_penalty_coef", {**config, "reduction": reduction}), loss)


ART = Framework.of("art", _art)

# Liger-Kernel: the part of its fused GRPO loss that follows the log-probs.
#
# The function receives the mask twice (the chunk's and the batch's).


def _liger() -> list[Subject]:
    """Three loss types with different reductions x ratio level x bias correction; the default comes first."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    def of_settings(kind: str, level: str, correction: bool) -> Subject:
        settings = {"loss_type": kind, "importance_sampling_level": level, "use_bias_correction_kl": correction}

        def loss(batch: Batch) -> Tensor:
            mask = batch.mask.to(batch.logp.dtype)
            return LigerFusedLinearGRPOFunction.ppo_loss_fn(
                batch.logp,
                mask,
                batch.advantages[:, 0],
                mask,
                ref_per_token_logps=batch.ref_logp,
                old_per_token_logps=batch.old_logp,
                beta=1.0,
                max_completion_length=mask.shape[1],
                **settings,
            )[0]

        return subject(named("liger grpo", settings), loss)

    return [of_settings(*x) for x in product(("dapo", "grpo", "dr_grpo"), ("token", "sequence"), (False, True))]


LIGER = Framework.of("liger", _liger)

# TorchRL: the KL to the reference of `GRPOLoss`, and `DistillationLoss`.
#
# `DistillationLoss` receives logp as the log-probs of its student and ref_logp as those of the teacher; by default it
# averages over the tokens of each completion. The package needs another version of TensorDict than verl.

TO_REF = "torchrl GRPOLoss kl_to_ref_coeff"


def _torchrl() -> list[Subject]:
    """The default with a KL, then distillation in both directions, averaged and summed."""
    return [
        _torchrl_grpo(),
        *(_torchrl_distilled(direction, mean) for direction in ("reverse", "forward") for mean in (True, False)),
    ]


def _torchrl_grpo() -> Subject:
    grpo = bare(_torchrl_files()["grpo"].GRPOLoss)

    def loss(batch: Batch) -> Tensor:
        logp = {"_cur_log_prob": batch.logp}
        return grpo._kl_to_ref(logp, ref_log_prob=batch.ref_logp, coeff=1.0, mask=batch.mask)[0]

    # Its mean is over the width of the batch, which groups share.
    return subject(TO_REF, loss)


def _torchrl_distilled(direction: str, mean: bool) -> Subject:
    settings = {"kl_direction": direction, "normalize_by_seq_length": mean, "reduction": "mean", "assistant_only": True}

    def loss(batch: Batch) -> Tensor:
        distillation = bare(
            _torchrl_files()["distillation"].DistillationLoss,
            **settings,
            tensor_keys=SimpleNamespace(history="history", teacher_log_prob="teacher", log_probs="student"),
            actor_network=lambda data: data,
            _device_fallback=batch.logp,
            _get_masks=lambda *_: (list(batch.mask), list(batch.mask), None),
        )
        data = _Data(history=None, teacher=list(batch.ref_logp), student=list(batch.logp))
        return distillation.forward(data).loss_distill

    return subject(f"torchrl DistillationLoss kl_direction={direction} normalize_by_seq_length={mean}", loss)


class _Data(dict[str, Any]):
    """What the loss reads of a TensorDict with one batch dimension."""

    ndim = 1

    def get(self, key: str, default: Any = None, *, as_list: bool = True) -> Any:
        return super().get(key, default)

    def select(self, *_: str) -> _Data:
        return self


@cache
def _torchrl_files() -> dict[str, ModuleType]:
    names = (f"torchrl.objectives.llm.{name}" for name in ("grpo", "distillation"))
    modules = load("torchrl", *names, replaced=("torchrl",))
    vars(modules["distillation"]).update(_runtime_device=lambda *_, **__: None)
    return modules


TORCHRL = Framework.of("torchrl", _torchrl)

# twinkle-kit: the KL of its `GRPOLoss` and `PPOLoss` (`beta`), that of its `GAEAdvantage`, and its `GKDLoss`.
#
# In the reward (`kl_coef`), `build_token_rewards` takes the log-probs at sampling and those of the reference,
# `GAEAdvantage` turns them into advantages without a critic, and `PPOLoss` applies them to logp. Distillation takes the
# logits of the policy and, as those of the teacher, of the reference.


def _twinkle() -> list[Subject]:
    """In the loss: both reductions. In the reward: whitened, as by default, and not. Then distillation."""
    return [
        *map(_twinkle_in_loss, ("GRPOLoss", "PPOLoss")),
        _twinkle_in_reward(True, 0.95),
        _twinkle_in_reward(False, 1.0),
        *map(_twinkle_distilled, (0.5, 0.0, 1.0)),
    ]


def _twinkle_in_loss(kind: str) -> Subject:
    policy_loss = getattr(_twinkle_files()["grpo"], kind)(beta=1.0)

    def loss(batch: Batch) -> Tensor:
        return policy_loss(
            {"labels": _labels(batch)},
            {"logps": batch.logp},
            old_logps=batch.old_logp,
            ref_logps=batch.ref_logp,
            advantages=batch.advantages,
        ).loss

    return subject(f"twinkle {kind} beta", loss)


def _twinkle_in_reward(normalize: bool, gae_lambda: float) -> Subject:
    modules = _twinkle_files()
    estimate = modules["gae"].GAEAdvantage(normalize=normalize, gae_lambda=gae_lambda)
    policy_loss = modules["grpo"].PPOLoss()

    def loss(batch: Batch) -> Tensor:
        import torch

        lists = lambda x: [row[live].tolist() for row, live in zip(x, batch.mask, strict=True)]
        lengths = batch.mask.sum(-1).tolist()
        rewards = estimate.build_token_rewards(
            batch.rewards, lengths, old_logps=lists(batch.old_logp), ref_logps=lists(batch.ref_logp), kl_coef=1.0
        )
        table = torch.zeros_like(batch.ref_logp)
        table[batch.mask] = table.new_tensor([x for row in rewards for x in row])
        advantages, _ = estimate(table, torch.zeros_like(table), masks=batch.mask)
        outputs, labels = {"logps": batch.logp}, {"labels": _labels(batch)}
        return policy_loss(labels, outputs, old_logps=batch.old_logp, advantages=advantages).loss

    name = f"twinkle kl_coef normalize_advantages={normalize} gae_lambda={gae_lambda:g}"
    return subject(name, loss, unwhitened="normalize_advantages=False" if normalize else "")


def _twinkle_distilled(beta: float) -> Subject:
    gkd = _twinkle_files()["gkd"].GKDLoss(beta=beta)

    def loss(batch: Batch) -> Tensor:
        return gkd({"labels": _labels(batch)}, {"logits": batch.logits}, teacher_logits=batch.ref_logits).loss

    return subject(f"twinkle GKDLoss beta={beta:g}", loss)


def _labels(batch: Batch) -> Tensor:
    return batch.tokens.where(batch.mask, IGNORED)


@cache
def _twinkle_files() -> dict[str, ModuleType]:
    data_format = ModuleType("twinkle.data_format")
    vars(data_format).update(LossOutput=SimpleNamespace)  # a TypedDict, whose items the trainer reads
    names = ("twinkle.loss.grpo", "twinkle.loss.gkd", "twinkle.advantage.gae")
    return load("twinkle-kit", *names, replaced=("twinkle",), loaded={"twinkle.data_format": data_format})


TWINKLE = Framework.of("twinkle", _twinkle)

# MLX-LM-LoRA: the loss of its GRPO, and its REINFORCE, whose KL is in the reward. mlx-tune: the loss of its GRPO.
#
# The update of MLX-LM-LoRA follows the rollout at once, and the ratio is 1. `_rlhf_reinforce_logp_loss` receives
# rewards of 0, or the advantages of the audit. Both cast to float32. `grpo_loss` of mlx-tune generates by itself: the
# completions of the batch stand in the place of those that it would sample, one call for each group, and `reward_fn`
# returns the advantages of the audit.


def _mlx_lm_lora() -> list[Subject]:
    """GRPO with each reduction, the default first; and REINFORCE, with and without a model of the reference."""
    return [*map(_mlx_grpo, ("grpo", "bnpo", "dr_grpo")), _reinforce(reference=True), _reinforce(reference=False)]


def _mlx_grpo(reduction: str) -> Subject:
    objective = file_of("mlx-lm-lora", "mlx_lm_lora.trainer.grpo_trainer")._grpo_objective

    def loss(x: dict[str, Any]) -> Any:
        width = x["mask"].shape[1]
        arguments = (x["logp"], x["ref_logp"], x["mask"], x["rewards"], 1.0, 1e-4, 1e-4, width, "token", reduction)
        return objective(*arguments)[0]

    name = f"mlx-lm-lora grpo_loss_type={reduction}"
    # A mean over the tokens of the batch couples its groups.
    return subject(name, of_arrays(loss, "mlx"))


def _reinforce(*, reference: bool) -> Subject:
    file = file_of("mlx-lm-lora", "mlx_lm_lora.trainer.rlhf_reinforce_trainer")

    def loss(x: dict[str, Any]) -> Any:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        ref = x["ref_logp"] if reference else mx.stop_gradient(x["logp"])
        return file._rlhf_reinforce_logp_loss(x["logp"], ref, x["rewards"], x["mask"], 1.0)[0]

    name = f"mlx-lm-lora rlhf_reinforce{'' if reference else ' without a reference model'}"
    return subject(name, of_arrays(loss, "mlx"))


def _mlx_tune() -> list[Subject]:
    """GRPO as it is."""

    def loss(x: dict[str, Any]) -> Any:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        rows = iter(mx.where(x["mask"], x["logp"], 0))
        losses = file_of("mlx-tune", "mlx_tune.losses")
        vars(losses)["generate_with_log_probs"] = lambda *_, **__: (mx.array([0, 0]), next(rows))
        rewards = iter(x["rewards"])
        return losses.grpo_loss(
            None,
            SimpleNamespace(decode=str),
            mx.array([0]),
            lambda *_: next(rewards),
            "",
            num_generations=len(x["logp"]),
            beta=1.0,
        )[0]

    return [subject("mlx-tune grpo beta", of_arrays(loss, "mlx"))]


MLX_LM_LORA = Framework.of("mlx-lm-lora", _mlx_lm_lora)
MLX_TUNE = Framework.of("mlx-tune", _mlx_tune)
