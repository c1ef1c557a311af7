"""What each framework's settings descend, by an independent reading of its formulae; held against its own code.

(on-policy, off-policy, at equal lengths on-policy): the first two over all problems, where a mean over tokens or a
clamp makes it `unknown`.
"""

UNKNOWN = ("unknown", "unknown", "unknown")


def token_mean(at_equal):
    """A mean over tokens: the target only where all completions are equally long."""
    return ("unknown", "unknown", at_equal)


def summed(on, off):
    return (on, off, on)


FORWARD, CORRECTED = summed("forward-kl-token", "unknown"), summed("reverse-kl-token", "reverse-kl-token-sampler")
GRPO = {
    # (ratio level, bias correction): the loss per token, before it is reduced
    ("token", True): CORRECTED,
    ("token", False): FORWARD,
    ("sequence", True): UNKNOWN,  # a (B, 1) ratio on per-token terms
    ("sequence", False): FORWARD,
}


def grpo(framework, loss_types):
    return {
        f"{framework} grpo loss_type={kind} importance_sampling_level={level} use_bias_correction_kl={correction}": (
            claim if kind in ("dr_grpo", "luspo") else token_mean(claim[2])
        )
        for kind in loss_types
        for (level, correction), claim in GRPO.items()
    }


TRL = grpo("trl", ("dapo", "grpo", "dr_grpo", "luspo")) | {
    "trl rloo normalize_advantages=False": summed("reverse-kl-sequence", "unknown"),
    "trl rloo normalize_advantages=True": UNKNOWN,
}
LIGER = grpo("liger", ("dapo", "grpo", "dr_grpo"))
OPENRLHF = {
    # the reward to go of k1, averaged over the batch's tokens by the policy loss
    "openrlhf algo.kl in reward estimator=k1 advantage=rloo": token_mean("reverse-kl-sequence"),
    "openrlhf algo.kl in reward estimator=k2 advantage=rloo": UNKNOWN,
    "openrlhf algo.kl in reward estimator=k3 advantage=rloo": UNKNOWN,
} | {
    f"openrlhf algo.kl.use_loss estimator={k} unbiased_gradient={unbiased}": (
        summed("reverse-kl-token", "unknown")  # the ratio is truncated at 10
        if unbiased
        else {"k1": summed("nothing", "unknown")}.get(k, UNKNOWN)  # values clamped at ±10
    )
    for k in ("k1", "k2", "k3")
    for unbiased in (False, True)
}
SKYRL = {
    "skyrl use_kl_loss kl_estimator_type=k3": UNKNOWN,
    "skyrl use_kl_loss kl_estimator_type=k1": token_mean("nothing"),
    "skyrl use_kl_loss kl_estimator_type=k2": token_mean("reverse-kl-token"),
    "skyrl use_kl_loss kl_estimator_type=abs": UNKNOWN,
}
REVERSE_TOKEN, REVERSE_SEQUENCE = summed("reverse-kl-token", "unknown"), summed("reverse-kl-sequence", "unknown")
VERL = {
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean": UNKNOWN,
    "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=token-mean": token_mean("reverse-kl-token"),
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=seq-mean-token-sum": UNKNOWN,
    "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=seq-mean-token-sum": REVERSE_TOKEN,
    "verl use_kl_loss kl_loss_type=kl loss_agg_mode=seq-mean-token-sum": summed("nothing", "unknown"),
    "verl use_kl_loss kl_loss_type=kl+ loss_agg_mode=seq-mean-token-sum": REVERSE_TOKEN,
    "verl use_kl_loss kl_loss_type=mse loss_agg_mode=seq-mean-token-sum": REVERSE_TOKEN,
    "verl use_kl_loss kl_loss_type=abs loss_agg_mode=seq-mean-token-sum": UNKNOWN,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=grpo": UNKNOWN,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=grpo without std": REVERSE_SEQUENCE,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo": REVERSE_SEQUENCE,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=reinforce_plus_plus": UNKNOWN,
    "verl distillation loss_mode=k1 use_policy_gradient=True": REVERSE_TOKEN,
    "verl distillation loss_mode=k2 use_policy_gradient=True": UNKNOWN,  # k2 as a detached coefficient
    "verl distillation loss_mode=k2 use_policy_gradient=False": UNKNOWN,  # values clamped at ±10
    "verl distillation loss_mode=k3 use_policy_gradient=True": UNKNOWN,
    "verl distillation loss_mode=k3 use_policy_gradient=False": UNKNOWN,
    **{
        f"verl use_kl_in_reward kl_penalty=low_var_kl adv_estimator={name}": UNKNOWN
        for name in ("grpo", "grpo without std", "rloo", "reinforce_plus_plus")
    },
}
ALL = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "skyrl": SKYRL, "liger": LIGER}
