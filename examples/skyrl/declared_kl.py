r"""A declared KL in SkyRL 0.3.0, by `trainer.override_entrypoint`.

    PYTHONPATH=examples/skyrl python -m skyrl.train.entrypoints.main_base \
      trainer.override_entrypoint=declared_kl trainer.algorithm.use_kl_loss=false \
      trainer.algorithm.use_kl_in_reward=true trainer.algorithm.kl_loss_coef=0.001 ...

with the other arguments as before. The folder has to be on PYTHONPATH on every node. `use_kl_in_reward` makes SkyRL
load the reference, and `kl_loss_coef` is β. This KL takes the place of SkyRL's own: β times its coefficient is
subtracted from the advantages, at the policy before the update. On the first update on a batch this is the declared KL;
later ones descend PPO's surrogate of it.

The trainer's methods are tested with SkyRL's own files. Untested: the launch, which needs vLLM and a GPU.
"""
# pyright: reportMissingImports=false

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate

ON_POLICY = KLTerm()
OFF_POLICY = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(2.0)))
"""KL(π‖ref) between completions; write another term here for another KL."""


class DeclaredKLTrainer(RayPPOTrainer):
    """SkyRL's trainer with the declared KL in the advantages."""

    def apply_reward_kl_penalty(self, data: Any) -> Any:
        """No KL in the reward."""
        return data

    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's advantages, minus β times the coefficient of the term."""
        algorithm = self.cfg.trainer.algorithm
        if algorithm.advantage_batch_normalize or not algorithm.use_kl_in_reward:
            raise ValueError(
                "The declared KL is in the advantages: set advantage_batch_normalize=false and use_kl_in_reward=true."
            )
        data = super().compute_advantages_and_returns(data)
        sampler = data.get("rollout_logprobs")  # of the inference engine
        logp, ref_logp, mask = (data[name] for name in ("action_log_probs", "base_action_log_probs", "loss_mask"))
        found = (ON_POLICY if sampler is None else OFF_POLICY)(Rollout(logp, ref_logp, mask, behavior_logp=sampler))
        data["advantages"] = data["advantages"] - algorithm.kl_loss_coef * found.coefficient
        self.all_metrics["klgrad/kl_per_completion"] = found.value.mean.item()
        return data


class Experiment(BasePPOExp):
    """SkyRL's experiment with this trainer."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> DeclaredKLTrainer:
        """The trainer, with SkyRL's arguments."""
        print(f"klgrad is active: {OFF_POLICY}")
        return DeclaredKLTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def run(cfg: Any) -> None:
    """In a task of Ray, as SkyRL does it."""
    Experiment(cfg).run()


def main() -> None:
    """What SkyRL calls for `trainer.override_entrypoint`, which its configuration does not know."""
    cfg = SkyRLTrainConfig.from_cli_overrides([x for x in sys.argv[1:] if "override_entrypoint=" not in x])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))  # pyright: ignore[reportFunctionMemberAccess]
