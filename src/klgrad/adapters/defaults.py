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
}
