"""What each framework descends with its default settings, with the KL switched on where it is off by default."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Default:
    """The default settings of a framework, with a KL.

    Attributes:
        settings: the defaults in words.
        subject: the name of the audited loss that has these settings; its recorded audit says what it descends.
    """

    settings: str
    subject: str


DEFAULTS = {
    "trl": Default(
        "GRPO has beta=0.0, no KL; with beta alone raised",
        "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    ),
    "verl": Default(
        "no KL; with use_kl_loss=True alone",
        "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean",
    ),
    "openrlhf": Default(
        "k1 in the reward, advantages by gae",
        "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0",
    ),
    "skyrl": Default("k3 as a loss", "skyrl use_kl_loss kl_estimator_type=k3"),
    "liger": Default(
        "beta=0.04, k3 without bias correction",
        "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    ),
    "ms-swift": Default("k3 as a loss, beta=0.04", "ms-swift loss_type=grpo"),
    "unsloth": Default(
        "GRPO has beta=0.0, no KL; with beta alone raised, and TRL's use_bias_correction_kl",
        "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    ),
    "trinity": Default(
        "k2 as a loss, kl_coef=0.001",
        "trinity kl_loss_fn=k2 loss_agg_mode=token-mean",
    ),
    "nemo-rl": Default(
        "k3 as a loss, reference_policy_kl_penalty=0.01",
        "nemo-rl reference_policy_kl_type=k3 token_level_loss=True",
    ),
    "prime-rl": Default(
        "no reference; a squared log-ratio to the sampler, kl_tau=0.001",
        "prime-rl trainer.loss.type=default kl_tau",
    ),
    "slime": Default(
        "no KL; with --use-kl-loss alone",
        "slime --use-kl-loss --kl-loss-type k1",
    ),
    "open-instruct": Default(
        "k3 as a loss, beta=0.05",
        "open-instruct kl_estimator=2 loss_denominator=token",
    ),
    "tinker-cookbook": Default(
        "no KL; with kl_penalty_coef alone raised",
        "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0",
    ),
}
