"""As `verdicts`, for ms-swift, Unsloth and Trinity-RFT, and for the frameworks whose formulae are transcribed."""

from frameworks.verdicts import ALL as FIRST, UNKNOWN, WHITENED, per_completion, summed

# k3 with values clamped at 10 has no gradient where log ref/π > 2.61, however it is averaged.
CLAMPED_K3 = UNKNOWN
# These hold where tokens are summed, and in large batches where they are averaged over the batch.
K1 = summed("nothing", "climbs forward-kl-sampler-sequence")
K2 = summed("reverse-kl-token", "squared-token")
K3 = summed("forward-kl-token", "k3-token")
CORRECTED = summed("reverse-kl-token", "reverse-kl-token-sampler")
REVERSE_SEQUENCE = summed("reverse-kl-sequence", "unknown")

SWIFT = {
    **{f"ms-swift loss_type={kind}": CLAMPED_K3 for kind in ("grpo", "bnpo", "dapo", "dr_grpo")},
    "ms-swift loss_type=dr_grpo rollout_importance_sampling_mode=token_truncate": CLAMPED_K3,
    "ms-swift loss_type=dr_grpo rollout_importance_sampling_mode=sequence_truncate": CLAMPED_K3,
    "ms-swift kl_in_reward advantage_estimator=rloo loss_type=dr_grpo": REVERSE_SEQUENCE,
    # divided by the standard deviation of the batch, or of the group
    "ms-swift kl_in_reward advantage_estimator=reinforce_plus_plus loss_type=dr_grpo": WHITENED,
    "ms-swift kl_in_reward advantage_estimator=grpo loss_type=dr_grpo": UNKNOWN,
}
UNSLOTH = {
    f"unsloth grpo loss_type={kind} importance_sampling_level={level} use_bias_correction_kl={correction}": CLAMPED_K3
    for kind in ("dapo", "grpo", "dr_grpo")
    for level, correction in (("token", True), ("token", False), ("sequence", True))
}
TRINITY = {
    "trinity kl_loss_fn=k2 loss_agg_mode=token-mean": K2,
    "trinity kl_loss_fn=k2 loss_agg_mode=seq-mean-token-sum": K2,
    "trinity kl_loss_fn=k1 loss_agg_mode=seq-mean-token-sum": K1,
    "trinity kl_loss_fn=k3 loss_agg_mode=seq-mean-token-sum": K3,
    "trinity kl_loss_fn=low_var_kl loss_agg_mode=seq-mean-token-sum": CLAMPED_K3,
    "trinity kl_loss_fn=abs loss_agg_mode=seq-mean-token-sum": UNKNOWN,
    # Its ratio is clamped at 2, so that off-policy it is not reverse-kl-token-sampler.
    "trinity kl_loss_fn=corrected_k3 loss_agg_mode=seq-mean-token-sum": summed("reverse-kl-token", "unknown"),
}
NEMO = {
    "reference_policy_kl_type=k3 token_level_loss=True": CLAMPED_K3,
    "reference_policy_kl_type=k3 token_level_loss=False": CLAMPED_K3,
    "reference_policy_kl_type=k1 token_level_loss=True": UNKNOWN,  # reverse-kl-token, but values clamped at ±10
    "reference_policy_kl_type=k2 token_level_loss=True": UNKNOWN,  # the ratio adds l²/2 to the coefficient
    "reference_policy_kl_type=k3 token_level_loss=True use_on_policy_kl_approximation=True": CLAMPED_K3,
    "reference_policy_kl_type=k3 token_level_loss=True use_on_policy_kl_approximation=True "
    "kl_output_clamp_value=null": CORRECTED,
}
PRIME = {
    "trainer.loss.type=default kl_tau": summed("nothing", "unknown"),  # on-policy its log-ratio to the sampler is 0
    "algorithm=opd": summed("reverse-kl-token", "unknown"),  # tokens that fell by 0.2 are dropped
}
SLIME = {
    "--use-kl-loss --kl-loss-type k1": per_completion("nothing"),
    "--use-kl-loss --kl-loss-type k1 --use-unbiased-kl": per_completion("reverse-kl-token"),
    "--use-kl-loss --kl-loss-type k2": per_completion("reverse-kl-token"),
    "--use-kl-loss --kl-loss-type k2 --use-unbiased-kl": UNKNOWN,
    "--use-kl-loss --kl-loss-type k3": per_completion("forward-kl-token"),
    "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl": per_completion("reverse-kl-token"),
    "--use-kl-loss --kl-loss-type low_var_kl": CLAMPED_K3,
    "--use-kl-loss --kl-loss-type low_var_kl --use-unbiased-kl": CLAMPED_K3,
    "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl --calculate-per-token-loss": CORRECTED,
    "--kl-coef --advantage-estimator grpo": summed("nothing", "nothing"),
}
OPEN_INSTRUCT = {
    f"kl_estimator={number} loss_denominator={denominator}": claim
    for number, claim in enumerate((K1, K2, K3, CORRECTED))
    for denominator in ("token", "N")
}
TINKER = {
    # less the mean over the batch, of which each completion is a part: in large batches that is a baseline. Summed to
    # go it is one for each later token, and so grows with the tokens that are left. The sampler's log-ratio is that of
    # π less log π/μ: off-policy the KL to ref is descended and that to the sampler climbed.
    "rl kl_penalty_coef kl_discount_factor=0.0": ("reverse-kl-token", "sum-of-targets", "unknown"),
    "rl kl_penalty_coef kl_discount_factor=1.0": UNKNOWN,
    "distillation kl_penalty_coef kl_discount_factor=0.0": summed("reverse-kl-token", "sum-of-targets"),
    "distillation kl_penalty_coef kl_discount_factor=1.0": REVERSE_SEQUENCE,
}
TRANSCRIBED = {
    "nemo-rl": NEMO,
    "prime-rl": PRIME,
    "slime": SLIME,
    "open-instruct": OPEN_INSTRUCT,
    "tinker-cookbook": TINKER,
}
ALL = {
    **FIRST,
    "ms-swift": SWIFT,
    "unsloth": UNSLOTH,
    "trinity": TRINITY,
    **{name: {f"{name} {setting}": claim for setting, claim in claims.items()} for name, claims in TRANSCRIBED.items()},
}
