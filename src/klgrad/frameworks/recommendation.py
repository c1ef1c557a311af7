"""Which settings of a framework have a given meaning, and code where no setting has it."""

from dataclasses import dataclass
from typing import Literal

from ..targets import Descends, Verdict

# The settings of each framework for each divergence and level. Where none has that meaning, `own_code` has code.
#
# Each entry names the audited loss with these settings; a test compares `descends` with its verdict.

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


# A `KLTerm` in each framework: code, the place where it goes, and where the framework keeps the tensors.
#
# The code is complete but for the names that the place has already. Tests run it, in the framework's own environment
# where it calls the framework.

KL_TRAINER = """\
from klgrad import {names}
from klgrad.trl import KLConfig, KLTrainer

args = KLConfig("runs/mine", kl_coef=0.04, loss_type="dr_grpo")
kl = {term}
trainer = KLTrainer(model, reward, args, kl=kl, train_dataset=prompts)\
"""

VERL = """\
from functools import partial

from klgrad import {names}
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding


def loss_with_kl(config, model_output, data, dp_group=None, beta=0.001):
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    logp = no_padding_2_padding(model_output["log_probs"], data)
    rows = data.select("ref_log_prob", "response_mask"{field}).to_padded_tensor()
    mask = rows["response_mask"].bool()
    term = {term}
    kl = term(Rollout(logp, rows["ref_log_prob"], mask{behavior}))
    kl_loss = agg_loss(kl.per_token, mask, config.loss_agg_mode, **config.global_batch_info)
    return loss + beta * kl_loss, metrics


loss_fn = partial(loss_with_kl, config=actor_config)\
"""

IN_PLACE = """\
from klgrad import {names}

term = {term}
kl = term(Rollout({logp}, {ref_logp}, {mask}{behavior}))
{result}\
"""


@dataclass(frozen=True)
class Home:
    """Where a term of one's own goes in a framework.

    Attributes:
        place: the place, after "in".
        code: the lines, with the term to be filled in.
        scope: the function in which the tensors have these names.
        tensors: where `logp`, `ref_logp`, `mask` and `behavior_logp` are.
        note: what else has to be set, and what the lines do.
    """

    place: str
    code: str
    scope: str
    tensors: dict[str, str]
    note: str


def _in_place(result: str, tensors: dict[str, str]) -> str:
    """The template of code that stands among a framework's own lines."""
    names = {role: tensors[role] for role in ("logp", "ref_logp", "mask")}
    return IN_PLACE.format(**names, result=result, names="{names}", term="{term}", behavior="{behavior}")


OPENRLHF = {
    "logp": "action_log_probs",
    "ref_logp": "base_action_log_probs",
    "mask": "experience.action_mask",
    "behavior_logp": "experience.rollout_log_probs",
}
SKYRL = {
    "logp": "action_log_probs",
    "ref_logp": "base_action_log_probs",
    "mask": "loss_mask",
    "behavior_logp": "rollout_action_logprobs",
}
OWN_LOOP = {"logp": "logp", "ref_logp": "ref_logp", "mask": "mask", "behavior_logp": "behavior_logp"}

HOMES = {
    "trl": Home(
        "KLTrainer, a GRPOTrainer with a KL of your choice",
        KL_TRAINER,
        "GRPOTrainer._compute_loss(self, model, inputs)",
        {
            "logp": "the first value of self._get_per_token_logps_and_entropies(...)",
            "ref_logp": 'inputs["ref_per_token_logps"]; TRL computes it only if beta is not 0',
            "mask": 'inputs["completion_mask"], times inputs["tool_mask"] if there is one',
            "behavior_logp": 'inputs["sampling_per_token_logps"] with use_vllm; otherwise '
            'inputs["old_per_token_logps"], which is missing where every batch is used for '
            "one update (then it is logp)",
        },
        'kl_coef is TRL\'s beta. loss_type="dr_grpo" divides the sum over the tokens, of the policy loss and of the KL '
        "alike, by rows times max_completion_length. The default, dapo, divides by the tokens of the batch: larger by "
        "max_completion_length / mean length, and exact for the KL in large batches only.",
    ),
    "verl": Home(
        "a loss function for the actor, which actor_rollout_wg.set_loss_fn takes",
        VERL,
        "the loss, f(config, model_output, data, dp_group)",
        {
            "logp": 'no_padding_2_padding(model_output["log_probs"], data)',
            "ref_logp": 'data["ref_log_prob"]',
            "mask": 'data["response_mask"]',
            "behavior_logp": 'data["rollout_log_probs"] (with rollout.calculate_log_probs=True, the default). '
            'data["old_log_probs"] are the log-probs that the trainer computed before the first update',
        },
        "In its default trainers the same is declared by settings, without code: see docs/verl.md. With this code, "
        "set actor_rollout_ref.actor.use_kl_loss=True with kl_loss_coef=0: without it verl loads no reference. "
        "actor_config is the ActorConfig of the run. The KL is reduced as the policy loss is: on every batch it is "
        "this KL with loss_agg_mode=seq-mean-token-sum, which sums the policy loss over the completion too.",
    ),
    "openrlhf": Home(
        "ActorPPOTrainer.training_step, in the place of its call of compute_approx_kl",
        _in_place("kl = kl.per_token", OPENRLHF),
        "ActorPPOTrainer.training_step(self, experience, kl_ctl, ...)",
        OPENRLHF,
        "Set --algo.kl.use_loss and leave --algo.kl.init_coef above 0, which is β: at 0 OpenRLHF loads no reference. "
        "Its next lines multiply by β and average over the tokens of the batch, as for the policy loss: this KL in "
        "large batches, and on every batch at equal lengths.",
    ),
    "skyrl": Home(
        "PolicyWorkerBase._forward_backward_micro, in the place of the two lines that compute kl_loss",
        _in_place("kl_loss = kl.loss", SKYRL),
        "PolicyWorkerBase._forward_backward_micro(self, experience, ...)",
        SKYRL,
        "Leave trainer.algorithm.use_kl_loss=true: without it SkyRL loads no reference. Its next line multiplies by "
        "kl_loss_coef, which is β. The KL is summed over each completion and averaged over completions, while "
        "loss_reduction reduces the policy loss.",
    ),
    "liger": Home(
        "the loss of your own loop: Liger's fused loss has no place for a term",
        _in_place("loss = loss + beta * kl.loss", OWN_LOOP),
        "your loop",
        OWN_LOOP,
        "All are (B, T), and mask is 1 at the tokens of the completion. Call LigerFusedLinearGRPOLoss with beta=0.",
    ),
}
"""By name of the framework."""


def term_of(meaning: Meaning, off_policy: bool) -> str:
    """The code of a `KLTerm` with this meaning, off-policy with bounded importance ratios."""
    divergence, level = meaning
    choices = [f'level="{level}"'] if divergence == "reverse" else ['divergence="forward"', f'level="{level}"']
    choices += ['estimator="k3"'] if divergence == "forward" else []
    if off_policy:
        ratio = "sequence" if meaning == ("forward", "sequence") else "prefix"
        choices.append(f'weighting=ImportanceWeighting("{ratio}", bound=Truncate(2.0))')
    return f"KLTerm({', '.join(choices)})"


def code(framework: str, meaning: Meaning, off_policy: bool) -> str:
    """The lines that add a KL with this meaning to the loss of a framework.

    Args:
        framework: a name of `HOMES`.
        meaning: the divergence and the level.
        off_policy: whether the samples are stale or from another engine.

    Returns:
        Python code. It has the names that `Home.place` has, and for TRL `model`, `reward` and `prompts`.

    Example:
        >>> print(code("openrlhf", ("reverse", "token"), off_policy=False))
        from klgrad import KLTerm, Rollout
        <BLANKLINE>
        term = KLTerm(level="token")
        kl = term(Rollout(action_log_probs, base_action_log_probs, experience.action_mask))
        kl = kl.per_token
    """
    home = HOMES[framework]
    names = {"KLTerm"} | ({"ImportanceWeighting", "Truncate"} if off_policy else set())
    names |= {"Rollout"} if "Rollout(" in home.code else set()
    sampler = 'rows["rollout_log_probs"]' if framework == "verl" else home.tensors["behavior_logp"]
    return home.code.format(
        names=", ".join(sorted(names)),
        term=term_of(meaning, off_policy),
        behavior=f", behavior_logp={sampler}" if off_policy else "",
        field=', "rollout_log_probs"' if off_policy else "",
    )
