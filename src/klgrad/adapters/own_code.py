"""A `KLTerm` in each framework: code, the place where it goes, and where the framework keeps the tensors.

The code is complete but for the names that the place has already. Tests run it, in the framework's own environment
where it calls the framework.
"""

from dataclasses import dataclass

from .recommendation import Meaning

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
