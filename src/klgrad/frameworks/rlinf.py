"""RLinf: the KL in the loss (`algorithm.kl_beta`), by both workers, and in the advantages of `reinpp`.

Each worker's own loss runs: `FSDPActor.training_step` up to the call of its gradient scaler, which receives the loss,
and the loss function that `MegatronActor.get_forward_step_func` builds. The first passes the log-probs of the reference
in the place of the policy's to `kl_penalty`, and the second does not. RLinf has no default for these settings: its
configuration files set them. In the advantages (`reinpp_kl_beta`), `compute_reinpp_advantages` takes the log-probs at
sampling. The policy loss wants float32. Only the files of the workers and of the algorithms are loaded.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from .framework import Framework
from .harness import bare, load, subject

if TYPE_CHECKING:
    from .harness import Batch, Subject, Tensor

STAND_INS = ("megatron", "params_resharding")
FILES = (
    *("utils.utils", "algorithms.utils", "algorithms.registry", "algorithms.losses", "algorithms.advantages"),
    *("workers.actor.fsdp_actor_worker", "workers.actor.megatron_actor_worker"),
)
TOKEN_MEAN, SUM = "token-mean", "seq-mean-token-sum"
KINDS = ("low_var_kl", "kl", "mse", "abs")


def subjects() -> list[Subject]:
    """Every estimator by the worker of FSDP, then by that of Megatron, and the advantages of `reinpp`."""
    return [
        in_loss("fsdp", "low_var_kl", TOKEN_MEAN),
        *(in_loss(worker, kind, SUM) for worker in ("fsdp", "megatron") for kind in KINDS),
        in_advantage("kl"),
    ]


def in_loss(worker: str, kind: str, reduction: str) -> Subject:
    """The KL in the loss, by the worker of `fsdp` or `megatron`."""
    run = _fsdp_loss if worker == "fsdp" else _megatron_loss

    def loss(batch: Batch) -> Tensor:
        return run(batch, batch.advantages, kind, reduction)

    return subject(f"rlinf actor={worker} kl_penalty_type={kind} loss_agg_func={reduction}", loss)


def in_advantage(kind: str) -> Subject:
    """The KL in the advantages of `reinpp`, whose returns are whitened over the batch."""
    modules = _modules()

    def loss(batch: Batch) -> Tensor:
        advantages, _ = modules["registry"].calculate_adv_and_returns(
            task_type="reasoning",
            adv_type="reinpp",
            rewards=batch.rewards.float(),
            loss_mask=batch.mask,
            group_size=batch.group_size,
            kl_beta=1.0,
            kl_penalty_type=kind,
            logprob=batch.old_logp.where(batch.mask, 0),  # as Megatron's inference returns them
            ref_logprob=batch.ref_logp.where(batch.mask, 0),
        )
        return _megatron_loss(batch, advantages, "kl", SUM, kl_beta=0.0)

    name = f"rlinf adv_type=reinpp reinpp_kl_beta kl_penalty_type={kind}"
    return subject(name, loss, unwhitened="another adv_type, with kl_beta")


class _Stop(Exception):
    """Ends a training step where its loss is known."""


def _fsdp_loss(batch: Batch, advantages: Tensor, kind: str, reduction: str) -> Tensor:
    losses: list[Tensor] = []

    def scale(loss: Tensor) -> None:
        losses.append(loss)
        raise _Stop

    worker = bare(
        _modules()["fsdp_actor_worker"].FSDPActor,
        **_settings(kind, reduction, 1.0, batch),
        micro_batch_size=len(batch.mask),
        enable_dynamic_batch_size=False,
        max_tokens_per_mbs=None,
        model=None,
        optimizer=SimpleNamespace(zero_grad=lambda: None),
        grad_scaler=SimpleNamespace(scale=scale),
        before_micro_batch=lambda *_, **__: nullcontext(),
        forward_batch=lambda *_: (batch.logp.float(), None),
        _split_to_micro_batch=lambda data, *_, **__: ([data], 1, None),
    )
    try:
        worker.training_step(_data(batch, advantages))
    except _Stop:
        return losses[0]
    raise AssertionError("the worker has not scaled its loss")


def _megatron_loss(batch: Batch, advantages: Tensor, kind: str, reduction: str, *, kl_beta: float = 1.0) -> Tensor:
    import torch

    # The log-prob of a token is one position before it, and the last one is of none.
    logp = torch.nn.functional.pad(batch.logp.float(), (0, 1))
    worker = bare(
        _modules()["megatron_actor_worker"].MegatronActor,
        **_settings(kind, reduction, kl_beta, batch),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        return_loss=True,
        variable_seq_lengths=True,
        transformer_config=SimpleNamespace(sequence_parallel=False),
        custom_forward=lambda *_, **__: {"log_probs": logp},
    )
    no_group = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=torch.distributed.ReduceOp)
    with (
        patch.object(torch.Tensor, "cuda", lambda self: self),
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(torch, "distributed", no_group),
    ):
        output, loss = worker.get_forward_step_func()(iter([_data(batch, advantages)]), None)
        return loss(output)[0]


def _settings(kind: str, reduction: str, kl_beta: float, batch: Batch) -> dict[str, Any]:
    algorithm = _Config(
        loss_type="actor",
        ratio_clip_eps=0.2,
        kl_beta=kl_beta,
        kl_penalty_type=kind,
        early_stop_imp_ratio=None,
        use_valid_token_scale=False,
        sampling_params=_Config(temperature=1.0),
    )
    return {
        "cfg": _Config(algorithm=algorithm, runner=_Config(task_type="reasoning")),
        "task_type": "reasoning",
        "response_len": batch.mask.shape[1],
        "loss_agg_func": _modules()["utils"].get_loss_agg_func(reduction),
        "calculate_entropy": False,
        "kl_beta": kl_beta,
        "kl_penalty_type": kind,
    }


def _data(batch: Batch, advantages: Tensor) -> dict[str, Tensor]:
    import torch

    ids = torch.nn.functional.pad(batch.tokens, (1, 0))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "position_ids": ids,
        "response_mask": batch.mask,
        "rollout_logprobs": batch.behavior_logp.float(),
        "ref_logprobs": batch.ref_logp,
        "advantages": advantages.float(),
    }


class _Config(SimpleNamespace):
    """Settings by name, and by `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@cache
def _modules() -> dict[str, ModuleType]:
    modules = load("rlinf", *(f"rlinf.{name}" for name in FILES), stand_ins=STAND_INS, replaced=("rlinf",))
    on_cpu = SimpleNamespace(torch_device_type="cpu", torch_platform=SimpleNamespace(current_device=lambda: "cpu"))
    vars(modules["fsdp_actor_worker"]).update(Worker=on_cpu)
    return modules


FRAMEWORK = Framework.of("rlinf", subjects)
