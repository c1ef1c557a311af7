"""Where the formulae of `klgrad.adapters.transcribed` were read; without torch, which the names alone do not need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Where a formula was read.

    Attributes:
        repository: on GitHub.
        version: the release.
        files: the files of that release that have the formula and its defaults.
    """

    repository: str
    version: str
    files: tuple[str, ...]


SOURCES = {
    "nemo-rl": Source(
        "NVIDIA-NeMo/RL", "0.7.0", ("nemo_rl/algorithms/utils.py", "nemo_rl/algorithms/loss/loss_functions.py")
    ),
    "prime-rl": Source("PrimeIntellect-ai/prime-rl", "0.8.0", ("src/prime_rl/trainer/rl/loss.py",)),
    "slime": Source("THUDM/slime", "0.3.1", ("slime/utils/ppo_utils.py", "slime/backends/megatron_utils/loss.py")),
    "open-instruct": Source(
        "allenai/open-instruct", "0.3.0", ("open_instruct/model_utils.py", "open_instruct/grpo_utils.py")
    ),
    "tinker-cookbook": Source(
        "thinking-machines-lab/tinker-cookbook",
        "0.5.8",
        ("tinker_cookbook/rl/metrics.py", "tinker_cookbook/distillation/train_on_policy.py"),
    ),
}
