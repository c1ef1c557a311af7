"""What each framework descends with its default settings, with the KL switched on where it is off by default."""

from dataclasses import dataclass

from ..targets import Descends, Verdict


@dataclass(frozen=True)
class Default:
    """The default settings of a framework, with a KL.

    Attributes:
        settings: the defaults in words.
        subject: the name of the audited loss that has these settings.
        descends: on-policy and off-policy, as the audit finds.
        at_equal_lengths: the on-policy verdict where all completions have the same length.
    """

    settings: str
    subject: str
    descends: Descends
    at_equal_lengths: Verdict

    def __str__(self) -> str:
        at_equal = f" ({self.at_equal_lengths} at equal lengths)" * (self.at_equal_lengths != self.descends.on_policy)
        return f"{self.settings}: {self.descends.on_policy} on-policy{at_equal}, {self.descends.off_policy} off-policy."


UNKNOWN = Descends("unknown", "unknown")

DEFAULTS = {
    "trl": Default(
        "GRPO has beta=0.0, no KL; with beta alone raised",
        "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
        UNKNOWN,
        "reverse-kl-token",
    ),
    "verl": Default(
        "no KL; with use_kl_loss=True alone",
        "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean",
        UNKNOWN,
        "unknown",
    ),
    "openrlhf": Default(
        "k1 in the reward, advantages by gae",
        "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0",
        UNKNOWN,
        "unknown",
    ),
    "skyrl": Default("k3 as a loss", "skyrl use_kl_loss kl_estimator_type=k3", UNKNOWN, "unknown"),
    "liger": Default(
        "beta=0.04, k3 without bias correction",
        "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
        UNKNOWN,
        "forward-kl-token",
    ),
    "ms-swift": Default("k3 as a loss, beta=0.04", "ms-swift loss_type=grpo", UNKNOWN, "unknown"),
    "unsloth": Default(
        "GRPO has beta=0.0, no KL; with beta alone raised, and TRL's use_bias_correction_kl",
        "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
        UNKNOWN,
        "unknown",
    ),
    "trinity": Default(
        "k2 as a loss, kl_coef=0.001",
        "trinity kl_loss_fn=k2 loss_agg_mode=token-mean",
        Descends("reverse-kl-token", "squared-token"),
        "reverse-kl-token",
    ),
    "nemo-rl": Default(
        "k3 as a loss, reference_policy_kl_penalty=0.01",
        "nemo-rl reference_policy_kl_type=k3 token_level_loss=True",
        UNKNOWN,
        "unknown",
    ),
    "prime-rl": Default(
        "no reference; a squared log-ratio to the sampler, kl_tau=0.001",
        "prime-rl trainer.loss.type=default kl_tau",
        Descends("nothing", "unknown"),
        "nothing",
    ),
    "slime": Default(
        "no KL; with --use-kl-loss alone",
        "slime --use-kl-loss --kl-loss-type k1",
        UNKNOWN,
        "nothing",
    ),
    "open-instruct": Default(
        "k3 as a loss, beta=0.05",
        "open-instruct kl_estimator=2 loss_denominator=token",
        Descends("forward-kl-token", "k3-token"),
        "forward-kl-token",
    ),
    "tinker-cookbook": Default(
        "no KL; with kl_penalty_coef alone raised",
        "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0",
        Descends("reverse-kl-token", "sum-of-targets"),
        "unknown",
    ),
}
