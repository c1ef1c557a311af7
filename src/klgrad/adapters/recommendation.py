"""The settings of each framework for each divergence and level, and code where no setting has that meaning.

Each entry names the audited loss with these settings; a test compares `descends` with its verdict.
"""

from dataclasses import dataclass
from typing import Literal

from ..targets import Descends, Verdict

Meaning = tuple[Literal["reverse", "forward"], Literal["token", "sequence"]]
"""The divergence and the level of a `KLTerm`."""

TARGET_OF: dict[Meaning, Verdict] = {
    ("reverse", "sequence"): "reverse-kl-sequence",
    ("reverse", "token"): "reverse-kl-token",
    ("forward", "token"): "forward-kl-token",
    ("forward", "sequence"): "forward-kl-sequence",
}
"""The target of each meaning. A test compares it with `klgrad.core.families`, which needs torch."""

CODE = """\
from klgrad import {names}

term = KLTerm({choices})
# All (B, T); mask is 1 at the completion's tokens.
kl = term(Rollout(logp, ref_logp, mask{behavior}))
loss = loss + beta * kl.loss\
"""
"""Code for the loss of a framework without such a setting; its tensors must have these names."""


@dataclass(frozen=True)
class Setting:
    """Configuration lines of one framework.

    Attributes:
        lines: the lines as a user writes them.
        subject: the name of the audited loss with these settings.
        descends: on-policy and off-policy, as the audit finds.
        note: further information.
    """

    lines: str
    subject: str
    descends: Descends
    note: str = ""


WHERE = {
    "trl": "a GRPOTrainer subclass's _compute_loss, with beta=0 in its config",
    "verl": "a loss set by worker.set_loss_fn, with use_kl_loss=False and use_kl_in_reward=False",
    "openrlhf": "an ActorPPOTrainer subclass's training_step, with --algo.kl.init_coef 0",
    "skyrl": "a policy loss under register_policy_loss, with use_kl_loss=False; it must receive the base log-probs",
    "liger": "the trainer's own loss: a fused loss has no place for it",
}

SETTINGS: dict[str, dict[Meaning, Setting]] = {
    "trl": {
        ("reverse", "token"): Setting(
            'GRPOConfig(beta=..., loss_type="dr_grpo", importance_sampling_level="token", use_bias_correction_kl=True)',
            "trl grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=True",
            Descends("reverse-kl-token", "reverse-kl-token-sampler"),
            "The default loss_type, dapo, averages over the tokens of the batch: the same only at equal lengths. "
            "With use_vllm, nothing corrects the KL for the difference between vLLM and the trainer: unknown there.",
        ),
        ("reverse", "sequence"): Setting(
            "RLOOConfig(beta=..., normalize_advantages=False)",
            "trl rloo normalize_advantages=False",
            Descends("reverse-kl-sequence", "unknown"),
            "The KL is frozen at the policy that sampled: right for the first update on a batch only.",
        ),
        ("forward", "token"): Setting(
            'GRPOConfig(beta=..., loss_type="dr_grpo", use_bias_correction_kl=False)',
            "trl grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=False",
            Descends("forward-kl-token", "unknown"),
        ),
    },
    "verl": {
        ("reverse", "token"): Setting(
            "actor_rollout_ref.actor.use_kl_loss=True\n"
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl+\n"
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=seq-mean-token-sum",
            Descends("reverse-kl-token", "unknown"),
            "Without the +, low_var_kl is the forward KL with its gradient cut off where log ref/π > 2.61.",
        ),
        ("reverse", "sequence"): Setting(
            "algorithm.use_kl_in_reward=True\nalgorithm.kl_penalty=kl\nalgorithm.adv_estimator=rloo\n"
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo",
            Descends("reverse-kl-sequence", "unknown"),
            "With adv_estimator=grpo the standard deviation of the group also divides the KL, which changes β; with "
            "gae that of the batch does, and lam < 1 discounts the part of the later KL that the critic does not "
            "predict.",
        ),
        ("forward", "token"): Setting(
            "actor_rollout_ref.actor.use_kl_loss=True\n"
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl\n"
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=seq-mean-token-sum",
            Descends("unknown", "unknown"),
            "It is forward-kl-token, without gradient where log ref/π > 2.61. Distillation with "
            "loss_mode=forward_kl_topk descends the forward KL from the teacher restricted to its top k tokens, off by "
            "up to twice the probability left out. It has no gradient where its value is negative, which happens when "
            "the student gives those tokens more probability than the teacher; with use_policy_gradient=True it "
            "descends nothing.",
        ),
    },
    "openrlhf": {
        ("reverse", "sequence"): Setting(
            "--algo.kl.estimator k1 --algo.advantage.estimator rloo",
            "openrlhf algo.kl in reward estimator=k1 advantage=rloo",
            Descends("unknown", "unknown"),
            "The policy loss averages over the batch's tokens, and log-ratios are clamped at 10: reverse-kl-sequence "
            "only at equal lengths and within ±10. The default estimator, gae, whitens: the batch's spread divides β.",
        ),
        ("reverse", "token"): Setting(
            "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient",
            "openrlhf algo.kl.use_loss estimator=k3 unbiased_gradient=True",
            Descends("unknown", "unknown"),
            "It averages over the batch's tokens: reverse-kl-token only at equal lengths. Off-policy its ratio is "
            "truncated at 10.",
        ),
    },
    "skyrl": {
        ("reverse", "sequence"): Setting(
            "trainer.algorithm.use_kl_loss=false\n"
            "trainer.algorithm.use_kl_in_reward=true\n"
            "trainer.algorithm.kl_estimator_type=k1\n"
            "trainer.algorithm.advantage_estimator=rloo\n"
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm\n"
            "trainer.algorithm.max_seq_len=...",
            "skyrl use_kl_in_reward estimator=k1 advantage=rloo",
            Descends("reverse-kl-sequence", "unknown"),
            "In the reward k3, the default, descends no divergence. With off_policy_correction.tis_ratio_type=sequence "
            "and sequence_tis_ratio_clip_high out of reach it holds for an inference engine's samples too, on the "
            "first update after a rollout, at a variance that grows with the length.",
        ),
        ("reverse", "token"): Setting(
            "trainer.algorithm.use_kl_loss=true\ntrainer.algorithm.kl_estimator_type=k2",
            "skyrl use_kl_loss kl_estimator_type=k2",
            Descends("unknown", "unknown"),
            "It divides by each completion's length: reverse-kl-token only where all are equally long.",
        ),
    },
    "liger": {
        ("reverse", "token"): Setting(
            'LigerFusedLinearGRPOLoss(beta=..., loss_type="dr_grpo", max_completion_length=..., '
            "use_bias_correction_kl=True)",
            "liger grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=True",
            Descends("reverse-kl-token", "reverse-kl-token-sampler"),
        ),
        ("forward", "token"): Setting(
            'LigerFusedLinearGRPOLoss(beta=..., loss_type="dr_grpo", max_completion_length=...)',
            "liger grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=False",
            Descends("forward-kl-token", "unknown"),
        ),
    },
}


def code(meaning: Meaning, off_policy: bool) -> str:
    """The lines that have this meaning, with a `KLTerm`."""
    divergence, level = meaning
    choices = [f'level="{level}"'] if divergence == "reverse" else ['divergence="forward"', f'level="{level}"']
    choices += ['estimator="k3"'] if divergence == "forward" else []
    names, behavior = "KLTerm, Rollout", ""
    if off_policy:
        ratio = "sequence" if meaning == ("forward", "sequence") else "prefix"
        choices.append(f'weighting=ImportanceWeighting("{ratio}", bound=Truncate(2.0))')
        names, behavior = "KLTerm, ImportanceWeighting, Rollout, Truncate", ", behavior_logp=behavior_logp"
    return CODE.format(names=names, choices=", ".join(choices), behavior=behavior)


def expresses(setting: Setting, meaning: Meaning, off_policy: bool) -> bool:
    """Whether the setting has this meaning on all problems, on-policy or off-policy."""
    return (setting.descends.off_policy if off_policy else setting.descends.on_policy) == TARGET_OF[meaning]
