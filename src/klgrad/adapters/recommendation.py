"""The settings of each framework for each divergence and level. Where none has that meaning, `own_code` has code.

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


@dataclass(frozen=True)
class Setting:
    """Configuration lines of one framework.

    Attributes:
        lines: the lines as a user writes them.
        subject: the name of the audited loss with these settings.
        descends: on-policy and off-policy, as the audit finds.
        note: further information.
        policy_loss: what the lines do to the policy loss beside the KL.
    """

    lines: str
    subject: str
    descends: Descends
    note: str = ""
    policy_loss: str = ""


DR_GRPO = (
    "dr_grpo divides the policy loss and the KL alike by rows x max_completion_length, where dapo, the default, "
    "divides by the tokens of the batch: gradients are smaller by mean length / max_completion_length, and β keeps "
    "its meaning."
)
SEQ_MEAN_TOKEN_SUM = (
    "loss_agg_mode reduces the policy loss, the entropy and the KL alike: a sum over the completion, where the "
    "default, token-mean, divides by the tokens of the batch. Gradients are larger by the mean length (mind the "
    "clipping of gradient norms), and β of a KL in the loss keeps its meaning."
)

SETTINGS: dict[str, dict[Meaning, Setting]] = {
    "trl": {
        ("reverse", "token"): Setting(
            "from trl import GRPOConfig\n\n"
            "args = GRPOConfig(\n"
            '    "runs/mine", beta=0.04, loss_type="dr_grpo", importance_sampling_level="token", '
            "use_bias_correction_kl=True\n)",
            "trl grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=True",
            Descends("reverse-kl-token", "reverse-kl-token-sampler"),
            "The default loss_type, dapo, averages over the tokens of the batch: the same at equal lengths and in "
            "large batches. With use_vllm, nothing corrects the KL for the difference between vLLM and the trainer.",
            DR_GRPO,
        ),
        ("reverse", "sequence"): Setting(
            'from trl import RLOOConfig\n\nargs = RLOOConfig("runs/mine", beta=0.05, normalize_advantages=False)',
            "trl rloo normalize_advantages=False",
            Descends("reverse-kl-sequence", "unknown"),
            "The KL is frozen at the policy that sampled: right for the first update on a batch only.",
            "this is another trainer, RLOOTrainer: one advantage and one clipped ratio per completion, and no division "
            "of the advantages by a standard deviation.",
        ),
        ("forward", "token"): Setting(
            "from trl import GRPOConfig\n\n"
            'args = GRPOConfig("runs/mine", beta=0.04, loss_type="dr_grpo", use_bias_correction_kl=False)',
            "trl grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=False",
            Descends("forward-kl-token", "k3-token"),
            policy_loss=DR_GRPO,
        ),
    },
    "verl": {
        ("reverse", "token"): Setting(
            "actor_rollout_ref.actor.use_kl_loss=True\n"
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl+\n"
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=seq-mean-token-sum",
            Descends("reverse-kl-token", "squared-token"),
            "Without the +, low_var_kl is the forward KL with its gradient cut off where log π/ref is below -2.61.",
            SEQ_MEAN_TOKEN_SUM,
        ),
        ("reverse", "sequence"): Setting(
            "algorithm.use_kl_in_reward=True\nalgorithm.kl_penalty=kl\nalgorithm.adv_estimator=rloo\n"
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo",
            Descends("reverse-kl-sequence", "unknown"),
            "With adv_estimator=grpo the standard deviation of the group also divides the KL, which changes β; with "
            "gae that of the batch does, and lam < 1 discounts the part of the later KL that the critic does not "
            "predict.",
            f"{SEQ_MEAN_TOKEN_SUM} adv_estimator=rloo needs several completions per prompt, rollout.n > 1, and uses no "
            "critic.",
        ),
        ("forward", "token"): Setting(
            "actor_rollout_ref.actor.use_kl_loss=True\n"
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl\n"
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=seq-mean-token-sum",
            Descends("unknown", "unknown"),
            "It is forward-kl-token, without gradient where log π/ref is below -2.61. Distillation with "
            "loss_mode=forward_kl_topk descends the forward KL from the teacher restricted to its top k tokens, off by "
            "up to twice the probability left out. It has no gradient where its value is negative, which happens when "
            "the student gives those tokens more probability than the teacher; with use_policy_gradient=True it "
            "descends nothing.",
            SEQ_MEAN_TOKEN_SUM,
        ),
    },
    "openrlhf": {
        ("reverse", "sequence"): Setting(
            "--algo.kl.estimator k1 --algo.advantage.estimator rloo",
            "openrlhf algo.kl in reward estimator=k1 advantage=rloo",
            Descends("unknown", "unknown"),
            "The policy loss averages over the batch's tokens, and log-ratios are clamped at 10: reverse-kl-sequence "
            "only at equal lengths and within ±10. The default estimator, gae, whitens: the batch's spread divides β.",
            "rloo replaces the critic by the other completions of the prompt: set --rollout.n_samples_per_prompt above "
            "1. The KL is added after this baseline.",
        ),
        ("reverse", "token"): Setting(
            "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient",
            "openrlhf algo.kl.use_loss estimator=k3 unbiased_gradient=True",
            Descends("reverse-kl-token", "unknown"),
            "It averages over the batch's tokens: right at equal lengths and in large batches. Off-policy its ratio is "
            "truncated at 10.",
            "none; --actor.loss_agg_mode reduces the policy loss, and the KL is always averaged over the tokens.",
        ),
    },
    "skyrl": {
        ("reverse", "sequence"): Setting(
            "trainer.algorithm.use_kl_loss=false\n"
            "trainer.algorithm.use_kl_in_reward=true\n"
            "trainer.algorithm.kl_estimator_type=k1\n"
            "trainer.algorithm.advantage_estimator=rloo\n"
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm\n"
            "trainer.algorithm.max_seq_len=4096",
            "skyrl use_kl_in_reward estimator=k1 advantage=rloo",
            Descends("reverse-kl-sequence", "unknown"),
            "In the reward k3, the default, descends no divergence. With off_policy_correction.tis_ratio_type=sequence "
            "and sequence_tis_ratio_clip_high out of reach it holds for an inference engine's samples too, on the "
            "first update after a rollout, at a variance that grows with the length.",
            "seq_mean_token_sum_norm divides the policy loss by rows x max_seq_len, where token_mean, the default, "
            "divides by the tokens of the batch: gradients are smaller by mean length / max_seq_len. rloo needs "
            "several completions per prompt.",
        ),
        ("reverse", "token"): Setting(
            "trainer.algorithm.use_kl_loss=true\ntrainer.algorithm.kl_estimator_type=k2",
            "skyrl use_kl_loss kl_estimator_type=k2",
            Descends("unknown", "unknown"),
            "It divides by each completion's length: reverse-kl-token only where all are equally long.",
            "none; loss_reduction reduces the policy loss only.",
        ),
    },
    "liger": {
        ("reverse", "token"): Setting(
            "from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss\n\n"
            'loss = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dr_grpo", max_completion_length=1024, '
            "use_bias_correction_kl=True)",
            "liger grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=True",
            Descends("reverse-kl-token", "reverse-kl-token-sampler"),
            policy_loss=DR_GRPO,
        ),
        ("forward", "token"): Setting(
            "from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss\n\n"
            'loss = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dr_grpo", max_completion_length=1024)',
            "liger grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=False",
            Descends("forward-kl-token", "k3-token"),
            policy_loss=DR_GRPO,
        ),
    },
}


def expresses(setting: Setting, meaning: Meaning, off_policy: bool) -> bool:
    """Whether the setting has this meaning on all problems, on-policy or off-policy."""
    return (setting.descends.off_policy if off_policy else setting.descends.on_policy) == TARGET_OF[meaning]
