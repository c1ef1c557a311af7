"""What each framework descends as it stands: its defaults, with the KL switched on where it is off."""

from dataclasses import dataclass

from ..targets import Descends, Verdict


@dataclass(frozen=True)
class Default:
    """The setting of a framework whose user has chosen nothing but to have a KL.

    Attributes:
        says: what the defaults are.
        subject: the audited setting that they are.
        descends: on- and off-policy, as the audit finds.
        at_equal_lengths: on-policy where all completions are equally long.
    """

    says: str
    subject: str
    descends: Descends
    at_equal_lengths: Verdict

    def __str__(self) -> str:
        at_equal = f" ({self.at_equal_lengths} at equal lengths)" * (self.at_equal_lengths != self.descends.on_policy)
        return f"{self.says}: {self.descends.on_policy} on-policy{at_equal}, {self.descends.off_policy} off-policy."


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
