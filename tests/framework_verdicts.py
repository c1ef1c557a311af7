"""What each framework's settings descend, by an independent reading of its formulae; held against its own code.

(on-policy, off-policy, at equal lengths on-policy), in large batches, where a mean over the tokens of the batch is a
sum up to its scale. A mean over each completion makes the first two `unknown`, and a clamp all three.
"""

UNKNOWN = ("unknown", "unknown", "unknown")


def per_completion(at_equal):
    """A mean over the tokens of each completion: the target only where all completions are equally long."""
    return ("unknown", "unknown", at_equal)


def summed(on, off):
    """A sum over tokens, or in large batches a mean over all of them."""
    return (on, off, on)


def every(claim, start, *settings):
    """One claim for several settings."""
    return {f"{start}{setting}": claim for setting in settings}


# These hold where tokens are summed, and in large batches where they are averaged over the batch.
K1 = summed("nothing", "climbs forward-kl-sampler-sequence")  # it pushes away from what was sampled (fact 22)
K2 = summed("reverse-kl-token", "squared-token")
K3 = summed("forward-kl-token", "k3-token")
CORRECTED = summed("reverse-kl-token", "reverse-kl-token-sampler")
CLAMPED_K3 = UNKNOWN  # values clamped at 10: no gradient where log ref/π > 2.61, however it is averaged
CLIPPED_TOKEN = summed("reverse-kl-token", "unknown")  # by PPO's clipped ratio
REVERSE_SEQUENCE = summed("reverse-kl-sequence", "unknown")
WHITENED = REVERSE_SEQUENCE  # divided by the standard deviation of the batch: in large batches a scale
EXACT_FORWARD = summed("forward-kl-token", "forward-kl-token-sampler")  # over the vocabulary at each prefix
DECLARED_SEQUENCE, DECLARED_TOKEN = (summed(x, x) for x in ("reverse-kl-sequence", "reverse-kl-token"))
GRPO = {
    # (ratio level, bias correction): the loss per token, before it is reduced
    ("token", True): CORRECTED,
    ("token", False): K3,
    ("sequence", True): UNKNOWN,  # a (B, 1) ratio on per-token terms
    ("sequence", False): K3,
}


def grpo(framework, loss_types):
    return {
        f"{framework} grpo loss_type={kind} importance_sampling_level={level} use_bias_correction_kl={correction}": (
            per_completion(claim[2]) if kind == "grpo" else claim
        )
        for kind in loss_types
        for (level, correction), claim in GRPO.items()
    }


# Without bias correction no ratio touches the KL, so its level has no row in TRL.
LEVEL_WITHOUT_CORRECTION = "importance_sampling_level=sequence use_bias_correction_kl=False"
DR_GRPO = "trl grpo loss_type=dr_grpo"  # and TRL's defaults: bias corrected, by the token ratio
# Scored by the trainer just before the loss, π_old is π: the ratio that should correct the KL is 1. The one that
# corrects for vLLM multiplies the policy's term, and the KL is added after. So: l_t on the sampler's tokens.
VLLM = K2
# The KL of completions that are cut off is dropped, so that no target is descended at any length.
TRUNCATED = UNKNOWN
TRL = {
    **{
        name: claim
        for name, claim in grpo("trl", ("dapo", "grpo", "dr_grpo", "luspo")).items()
        if LEVEL_WITHOUT_CORRECTION not in name
    },
    **every(CORRECTED, "trl grpo loss_type=", "bnpo", "cispo", "vespo"),
    "trl grpo loss_type=sapo": per_completion("reverse-kl-token"),
    f"{DR_GRPO} mask_truncated_completions=True": TRUNCATED,
    f"{DR_GRPO} use_vllm=True": VLLM,
    **every(
        VLLM,
        f"{DR_GRPO} use_vllm=True vllm_importance_sampling_",
        *("mode=sequence_truncate", "mode=token_mask", "mode=token_truncate", "correction=False"),
    ),
    "trl rloo normalize_advantages=False": REVERSE_SEQUENCE,
    "trl rloo normalize_advantages=True": WHITENED,
    "trl rloo normalize_advantages=False mask_truncated_completions=True": TRUNCATED,
    # Cov_μ(Σl, Σs), the gradient of Var_μ(Σl) / 2: the squared log-ratio and, as the leave-one-out mean is no baseline
    # off-policy, a drift.
    "trl rloo normalize_advantages=False use_vllm=True": summed("reverse-kl-sequence", "sum-of-targets"),
    # The divergence over the vocabulary at each prefix of a completion: those of the sampler, if π did not sample it.
    "trl distillation beta=1.0": CORRECTED,
    "trl distillation beta=0.5": UNKNOWN,  # the Jensen-Shannon divergence, which is no target of the audit
    "trl distillation beta=0.0": EXACT_FORWARD,
}
LIGER = grpo("liger", ("dapo", "grpo", "dr_grpo"))
OPENRLHF = {
    # the reward to go of k1, averaged over the batch's tokens by the policy loss; scores are scaled before it is added.
    # Where lengths are equal it is reverse-kl-sequence but for log-ratios beyond 10, which are clamped.
    "openrlhf algo.kl in reward estimator=k1 advantage=rloo": UNKNOWN,
    "openrlhf algo.kl in reward estimator=k1 advantage=group_norm": UNKNOWN,
    "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0": UNKNOWN,  # divided by the batch's deviation
    # less the batch's mean, in which a completion's later tokens weigh more: its own share of that is not the target
    "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0 no_std_norm": UNKNOWN,
    "openrlhf algo.kl in reward estimator=k2 advantage=rloo": UNKNOWN,
    "openrlhf algo.kl in reward estimator=k3 advantage=rloo": UNKNOWN,
} | {
    # averaged over the batch's tokens, too
    f"openrlhf algo.kl.use_loss estimator={k} unbiased_gradient={unbiased}": (
        CLIPPED_TOKEN if unbiased else UNKNOWN
    )  # without the switch: values clamped at 10, k1 too, which is otherwise nothing at equal lengths
    for k in ("k1", "k2", "k3")
    for unbiased in (False, True)
}
SKYRL_REWARD = {
    **every(REVERSE_SEQUENCE, "k1 advantage=", "rloo token_mean", "grpo without std", "rloo"),
    **every(UNKNOWN, "", "k3 advantage=grpo token_mean", "k1 advantage=grpo"),
    **every(UNKNOWN, "", "k3 advantage=rloo", "k2 advantage=rloo", "abs advantage=rloo"),
    "k1 advantage=maxrl": UNKNOWN,  # divided by the group's mean, KL and all
    **every(WHITENED, "k1 advantage=", "reinforce++", "gae critic=0"),
    # the KL of the policy itself, weighted by π/μ of the token, or of the completion up to a cap
    **every(REVERSE_SEQUENCE, "k1 advantage=rloo tis=", "token", "sequence"),
    "k1 advantage=rloo tis=sequence uncapped": summed("reverse-kl-sequence", "reverse-kl-sequence"),
}
SKYRL = {
    "skyrl use_kl_loss kl_estimator_type=k3": UNKNOWN,
    "skyrl use_kl_loss kl_estimator_type=k1": per_completion("nothing"),
    "skyrl use_kl_loss kl_estimator_type=k2": per_completion("reverse-kl-token"),
    "skyrl use_kl_loss kl_estimator_type=abs": UNKNOWN,
} | {f"skyrl use_kl_in_reward estimator={setting}": claim for setting, claim in SKYRL_REWARD.items()}
VERL = {
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean": CLAMPED_K3,
    "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=token-mean": K2,
    **{
        f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode=seq-mean-token-sum": claim
        for claim, kinds in ((CLAMPED_K3, ("low_var_kl",)), (K2, ("low_var_kl+", "kl+", "mse")), (K1, ("kl",)))
        for kind in kinds
    },
    "verl use_kl_loss kl_loss_type=abs loss_agg_mode=seq-mean-token-sum": UNKNOWN,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=grpo": UNKNOWN,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=grpo without std": REVERSE_SEQUENCE,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo": REVERSE_SEQUENCE,
    **every(WHITENED, "verl use_kl_in_reward kl_penalty=kl adv_estimator=", "reinforce_plus_plus", "gae critic=0"),
    "verl distillation loss_mode=k1 use_policy_gradient=True": CLIPPED_TOKEN,
    "verl distillation loss_mode=k2 use_policy_gradient=True": UNKNOWN,  # k2 as a detached coefficient
    "verl distillation loss_mode=k2 use_policy_gradient=False": K2,
    "verl distillation loss_mode=k1 use_policy_gradient=True loss_max_clamp=10": UNKNOWN,  # log-ratios beyond ±10
    "verl distillation loss_mode=k2 use_policy_gradient=False loss_max_clamp=10": UNKNOWN,  # values beyond 10
    "verl distillation loss_mode=k3 use_policy_gradient=True": UNKNOWN,
    "verl distillation loss_mode=k3 use_policy_gradient=False": UNKNOWN,
    "verl distillation loss_mode=k3 use_policy_gradient=True loss_max_clamp=10": UNKNOWN,  # k3 in the reward
    **every(
        UNKNOWN,
        "verl use_kl_in_reward kl_penalty=low_var_kl adv_estimator=",
        *("grpo", "grpo without std", "rloo", "reinforce_plus_plus", "gae critic=0"),
    ),
}
PREFIX = "ratio=prefix ratio_bound=none loss_agg_mode=seq-mean-token-sum"
# verl with klgrad: what the term declares, off-policy too where the prefix ratio corrects it.
VERL |= {
    "verl klgrad placement=loss level=sequence loss_agg_mode=seq-mean-token-sum": REVERSE_SEQUENCE,
    f"verl klgrad placement=loss level=sequence {PREFIX}": DECLARED_SEQUENCE,
    "verl klgrad placement=loss level=token loss_agg_mode=seq-mean-token-sum": K2,
    f"verl klgrad placement=loss level=token {PREFIX}": DECLARED_TOKEN,
    "verl klgrad placement=loss level=token ratio=token ratio_bound=none loss_agg_mode=seq-mean-token-sum": CORRECTED,
    f"verl klgrad placement=loss divergence=forward level=token estimator=k3 {PREFIX}": summed(
        "forward-kl-token", "forward-kl-token"
    ),
    "verl klgrad placement=advantage level=sequence baseline=leave_one_out loss_agg_mode=seq-mean-token-sum": (
        REVERSE_SEQUENCE
    ),
    f"verl klgrad placement=advantage level=sequence baseline=leave_one_out {PREFIX}": DECLARED_SEQUENCE,
    f"verl klgrad placement=advantage level=token {PREFIX}": DECLARED_TOKEN,
    f"verl klgrad placement=loss reference=teacher level=token {PREFIX}": DECLARED_TOKEN,
    "verl klgrad placement=loss level=sequence ratio=prefix ratio_bound=none loss_agg_mode=token-mean": (
        DECLARED_SEQUENCE
    ),
}

# ms-swift, Unsloth and Trinity-RFT, and the frameworks whose formulae are transcribed.

SWIFT = {
    **every(CLAMPED_K3, "ms-swift loss_type=", "grpo", "bnpo", "dapo", "dr_grpo"),
    **every(
        CLAMPED_K3,
        "ms-swift loss_type=dr_grpo rollout_importance_sampling_mode=",
        *("token_truncate", "sequence_truncate"),
    ),
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
    **every(K2, "trinity kl_loss_fn=k2 loss_agg_mode=", "token-mean", "seq-mean-token-sum"),
    "trinity kl_loss_fn=k1 loss_agg_mode=seq-mean-token-sum": K1,
    "trinity kl_loss_fn=k3 loss_agg_mode=seq-mean-token-sum": K3,
    "trinity kl_loss_fn=low_var_kl loss_agg_mode=seq-mean-token-sum": CLAMPED_K3,
    "trinity kl_loss_fn=abs loss_agg_mode=seq-mean-token-sum": UNKNOWN,
    # Its ratio is clamped at 2, so that off-policy it is not reverse-kl-token-sampler.
    "trinity kl_loss_fn=corrected_k3 loss_agg_mode=seq-mean-token-sum": summed("reverse-kl-token", "unknown"),
}
NEMO = {
    **every(CLAMPED_K3, "reference_policy_kl_type=k3 token_level_loss=", "True", "False"),
    "reference_policy_kl_type=k1 token_level_loss=True": UNKNOWN,  # reverse-kl-token, but values clamped at ±10
    "reference_policy_kl_type=k2 token_level_loss=True": UNKNOWN,  # the ratio adds l²/2 to the coefficient
    "reference_policy_kl_type=k3 token_level_loss=True use_on_policy_kl_approximation=True": CLAMPED_K3,
    "reference_policy_kl_type=k3 token_level_loss=True use_on_policy_kl_approximation=True "
    "kl_output_clamp_value=null": UNKNOWN,  # reverse-kl-token where the log-ratio is within ±20, which clamps it
    # the estimate as a coefficient, clamped at 10
    **every(UNKNOWN, "use_kl_in_reward adv_estimator=reinforce_plus_plus reference_policy_kl_type=", "k3", "k1"),
}
PRIME = {
    "trainer.loss.type=default kl_tau": summed("nothing", "unknown"),  # on-policy its log-ratio to the sampler is 0
    "algorithm=opd": summed("reverse-kl-token", "unknown"),  # tokens that fell by 0.2 are dropped
}
SLIME_LOSSES = {
    "--use-kl-loss --kl-loss-type k1": per_completion("nothing"),
    "--use-kl-loss --kl-loss-type k1 --use-unbiased-kl": per_completion("reverse-kl-token"),
    "--use-kl-loss --kl-loss-type k2": per_completion("reverse-kl-token"),
    "--use-kl-loss --kl-loss-type k2 --use-unbiased-kl": UNKNOWN,
    "--use-kl-loss --kl-loss-type k3": per_completion("forward-kl-token"),
    "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl": per_completion("reverse-kl-token"),
    **every(CLAMPED_K3, "--use-kl-loss --kl-loss-type low_var_kl", "", " --use-unbiased-kl"),
    "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl --calculate-per-token-loss": CORRECTED,
    "--kl-coef --advantage-estimator grpo": summed("nothing", "nothing"),
}
MILES = SLIME_LOSSES | {
    # by PPO's clipped ratio, averaged over each completion
    "--kl-coef --kl-loss-type k1 --advantage-estimator reinforce_plus_plus": per_completion("reverse-kl-sequence"),
    "--kl-coef --kl-loss-type k3 --advantage-estimator reinforce_plus_plus": per_completion("sum-of-targets"),
    "--use-opd": per_completion("reverse-kl-token"),
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
    "rl kl_penalty_coef kl_discount_factor=0.0": summed("reverse-kl-token", "unknown"),
    "rl kl_penalty_coef kl_discount_factor=1.0": UNKNOWN,
    "distillation kl_penalty_coef kl_discount_factor=0.0": summed("reverse-kl-token", "unknown"),
    "distillation kl_penalty_coef kl_discount_factor=1.0": REVERSE_SEQUENCE,
}
EASYR1 = {
    "kl_penalty=kl adv_estimator=grpo": UNKNOWN,  # divided by the group's deviation
    "kl_penalty=kl adv_estimator=rloo": REVERSE_SEQUENCE,
    "kl_penalty=low_var_kl adv_estimator=rloo": UNKNOWN,
    "use_kl_loss kl_penalty=kl": K1,
    "use_kl_loss kl_penalty=mse": K2,
    "use_kl_loss kl_penalty=low_var_kl": CLAMPED_K3,
}
ROLL = {
    **every(CLAMPED_K3, "use_kl_loss loss_agg_mode=", "seq-mean-token-mean", "token-mean", "seq-mean-token-sum"),
    "add_token_level_kl kl_penalty=kl adv_estimator=gae": UNKNOWN,  # λ = 0.95
    "add_token_level_kl kl_penalty=kl adv_estimator=reinforce": per_completion("reverse-kl-sequence"),
    "is_pure_opd kl_penalty=kl": per_completion("reverse-kl-token"),
}
MOLT = {
    "algo.kl in reward estimator=k1 advantage=reinforce": WHITENED,
    "algo.kl in reward estimator=k1 advantage=reinforce no_whiten": REVERSE_SEQUENCE,
    "algo.kl in reward advantage=on_policy_distill": CLIPPED_TOKEN,
    "algo.kl.use_loss estimator=k1": K1,
    "algo.kl.use_loss estimator=k2": UNKNOWN,  # values clamped at 10
    "algo.kl.use_loss estimator=k3": CLAMPED_K3,
}

# AReaL, RLinf, cosmos-rl, TorchRL, Axolotl, LLaMA-Factory, OpenPipe ART and twinkle-kit.
#
# Where ref is below π by more than the clamp allows the gradient ends, as of CLAMPED_K3.
AREAL = {
    # log-ratios or values clamped at 10
    **every(UNKNOWN, "areal kl_ctl kl_estimator=", "k1", "k2", "k3", "k1 adv_norm.std_level=batch"),
    "areal teacher.rl_loss_weight=1": K1,
    "areal teacher.rl_loss_weight=0": CORRECTED,
}
RLINF = {
    # k3 of the swapped log-ratio: its slope is that of χ²/2, which is no target
    **every(UNKNOWN, "rlinf actor=fsdp kl_penalty_type=low_var_kl loss_agg_func=", "token-mean", "seq-mean-token-sum"),
    # log ref/π as a loss makes the sampled tokens likelier
    "rlinf actor=fsdp kl_penalty_type=kl loss_agg_func=seq-mean-token-sum": summed(
        "nothing", "forward-kl-sampler-sequence"
    ),
    "rlinf actor=megatron kl_penalty_type=low_var_kl loss_agg_func=seq-mean-token-sum": CLAMPED_K3,
    "rlinf actor=megatron kl_penalty_type=kl loss_agg_func=seq-mean-token-sum": K1,
    "rlinf adv_type=reinpp reinpp_kl_beta kl_penalty_type=kl": WHITENED,
} | {
    # the square and the absolute value have no direction to swap
    f"rlinf actor={worker} kl_penalty_type={kind} loss_agg_func=seq-mean-token-sum": claim
    for worker in ("fsdp", "megatron")
    for kind, claim in (("mse", K2), ("abs", UNKNOWN))
}
COSMOS = {
    f"cosmos-rl kl_beta loss_type={kind} unbiased_kl_estimate={unbiased}": CLAMPED_K3
    for kind in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    for unbiased in (False, True)
}
TORCHRL = {
    "torchrl GRPOLoss kl_to_ref_coeff": K3,
    "torchrl DistillationLoss kl_direction=reverse normalize_by_seq_length=True": per_completion("forward-kl-token"),
    "torchrl DistillationLoss kl_direction=reverse normalize_by_seq_length=False": K3,
    # the swapped log-ratio, on samples of the student: χ²/2
    **every(UNKNOWN, "torchrl DistillationLoss kl_direction=forward normalize_by_seq_length=", "True", "False"),
}
AXOLOTL = {
    f"axolotl async loss_type={kind} use_bias_correction_kl={corrected}": (
        per_completion(claim[2]) if kind == "grpo" else claim
    )
    for kind in ("dapo", "grpo", "dr_grpo")
    for corrected, claim in ((False, K3), (True, CORRECTED))
} | {
    "axolotl kd_trainer kd_beta=0": EXACT_FORWARD,
    "axolotl kd_trainer kd_beta=0.5": UNKNOWN,  # a Jensen-Shannon divergence
    "axolotl kd_trainer kd_beta=1": CORRECTED,
}
ART = {
    f"art kl_penalty_coef kl_penalty_source={source} ppo={ppo} reduction={reduction}": CLIPPED_TOKEN
    for source, ppo, reduction in (
        *((source, ppo, "mean") for source in ("current_learner", "sample") for ppo in (False, True)),
        ("current_learner", False, "sum"),
    )
}
TWINKLE = {
    "twinkle GRPOLoss beta": per_completion("forward-kl-token"),
    "twinkle PPOLoss beta": K3,
    "twinkle kl_coef normalize_advantages=True gae_lambda=0.95": UNKNOWN,
    "twinkle kl_coef normalize_advantages=False gae_lambda=1": REVERSE_SEQUENCE,
    "twinkle GKDLoss beta=0.5": UNKNOWN,  # the Jensen-Shannon divergence
    "twinkle GKDLoss beta=0": EXACT_FORWARD,
    "twinkle GKDLoss beta=1": CORRECTED,
}
TUNIX = {
    "tunix grpo kl_loss_mode=kl loss_agg_mode=sequence-mean-token-mean": per_completion("nothing"),
    "tunix grpo kl_loss_mode=mse_kl loss_agg_mode=sequence-mean-token-mean": per_completion("reverse-kl-token"),
    "tunix grpo kl_loss_mode=low_var_kl loss_agg_mode=sequence-mean-token-mean": per_completion("forward-kl-token"),
    "tunix grpo kl_loss_mode=kl loss_agg_mode=token-mean": K1,
    **every(K2, "tunix grpo kl_loss_mode=mse_kl loss_agg_mode=", "token-mean", "seq-mean-token-sum"),
    "tunix agentic_grpo kl_loss_mode=kl loss_agg_mode=sequence-mean-token-mean": per_completion("nothing"),
    **{f"tunix ppo kl_method={method} gae_lambda=0.95": UNKNOWN for method in ("low_var_kl", "kl", "mse_kl")},
    "tunix ppo kl_method=kl gae_lambda=1": REVERSE_SEQUENCE,
}
MAXTEXT = {
    "maxtext rl.grpo_beta rl.loss_agg_mode=sequence-mean-token-mean": per_completion("nothing"),
    "maxtext rl.grpo_beta rl.loss_agg_mode=token-mean": K1,
    "maxtext experimental.rl grpo_beta": per_completion("forward-kl-token"),
    # With a cross-entropy on the sampled tokens, whose mean is 0 on fresh samples. On stale ones it descends KL(μ, π).
    "maxtext distill_alpha=0.5": summed("forward-kl-token", "sum-of-targets"),
    "maxtext distill_alpha=1": EXACT_FORWARD,
    "maxtext distill_alpha=1 offline, top 20": UNKNOWN,  # both sides have a sum of 1 over the teacher's top 20
}
EASYDEL = {
    **every(K3, "easydel grpo loss_type=", "dapo", "dr_grpo"),
    "easydel grpo loss_type=grpo": per_completion("forward-kl-token"),
    **{f"easydel ppo kl_estimator={kind} whiten_advantages=True": UNKNOWN for kind in ("k1", "k3")},
    "easydel ppo kl_estimator=k1 whiten_advantages=False": UNKNOWN,  # with lam=0.95, which discounts later tokens
    "easydel gkd beta=0.5": UNKNOWN,  # a Jensen-Shannon divergence, which is no target
    "easydel gkd beta=0": CORRECTED,
    "easydel gkd beta=1": EXACT_FORWARD,
}
MLX = {
    **every(CLAMPED_K3, "mlx-lm-lora grpo_loss_type=", "grpo", "bnpo", "dr_grpo"),
    "mlx-lm-lora rlhf_reinforce": UNKNOWN,  # the reverse KL minus the entropy of whole completions
    "mlx-lm-lora rlhf_reinforce without a reference model": UNKNOWN,
}
TRANSCRIBED = {
    "nemo-rl": NEMO,
    "prime-rl": PRIME,
    "slime": SLIME_LOSSES,
    "open-instruct": OPEN_INSTRUCT,
    "tinker-cookbook": TINKER,
    "easyr1": EASYR1,
    "roll": ROLL,
    "miles": MILES,
    "molt": MOLT,
}
ALL = {
    "trl": TRL,
    "verl": VERL,
    "openrlhf": OPENRLHF,
    "skyrl": SKYRL,
    "liger": LIGER,
    "ms-swift": SWIFT,
    "unsloth": UNSLOTH,
    "trinity": TRINITY,
    "areal": AREAL,
    "rlinf": RLINF,
    "cosmos-rl": COSMOS,
    "torchrl": TORCHRL,
    "axolotl": AXOLOTL,
    "llamafactory": {"llamafactory use_asft_loss asft_alpha": EXACT_FORWARD},
    "art": ART,
    "twinkle": TWINKLE,
    "tunix": TUNIX,
    "maxtext": MAXTEXT,
    "easydel": EASYDEL,
    "mlx-lm-lora": MLX,
    "mlx-tune": {"mlx-tune grpo beta": summed("nothing", "nothing")},
    **{name: {f"{name} {setting}": claim for setting, claim in claims.items()} for name, claims in TRANSCRIBED.items()},
}
