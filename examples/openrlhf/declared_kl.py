"""A declared KL in OpenRLHF 0.11.2, which has no plug-ins: a script in the place of `openrlhf.cli.train_ppo_ray`.

    PYTHONPATH=examples/openrlhf python -m declared_kl --algo.kl.use_loss --algo.kl.init_coef 0.01 ...

with the other arguments as before. The folder has to be on PYTHONPATH on every node. `--algo.kl.init_coef` is β, and
OpenRLHF loads the reference unless it is 0. OpenRLHF averages this KL over the tokens of the batch, with every
`--actor.loss_agg_mode`. It is weighted back to the policy from what sampled: the rollout engine if OpenRLHF has its
log-probs, or else the policy before the update.

The loss is tested with OpenRLHF's own files. Untested: the launch, which needs DeepSpeed and a GPU.
"""
# pyright: reportMissingImports=false

import runpy
from typing import Any

import ray
from openrlhf.trainer.ray import ppo_actor
from torch import Tensor

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate

TERM = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(2.0)))
"""KL(π‖ref) between completions; write another term here for another KL."""


class DeclaredKLTrainer(ppo_actor.ActorPPOTrainer):
    """OpenRLHF's trainer with the declared KL in the place of `compute_approx_kl`, which does not see the mask."""

    def training_step(self, experience: Any, *args: Any, **kwargs: Any) -> Any:
        """OpenRLHF's step."""
        if not self.args.algo.kl.use_loss:
            raise ValueError("The declared KL is in the loss: set --algo.kl.use_loss, and --algo.kl.init_coef above 0.")
        sampler = experience.rollout_log_probs
        sampler = experience.action_log_probs if sampler is None else sampler

        def per_token(logp: Tensor, ref_logp: Tensor, **_: Any) -> Tensor:
            rollout = Rollout(logp, ref_logp, experience.action_mask, behavior_logp=sampler)
            return TERM(rollout).per_token + rollout.log_ratio  # whose mean is the `kl` that OpenRLHF logs

        ppo_actor.compute_approx_kl = per_token
        return super().training_step(experience, *args, **kwargs)


class DeclaredKLActor(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class):
    """OpenRLHF's worker of the policy, with this trainer."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """OpenRLHF's set-up."""
        ppo_actor.ActorPPOTrainer = DeclaredKLTrainer
        super().init_model_from_pretrained(*args, **kwargs)
        print(f"klgrad is active: {TERM}")


def main() -> None:
    """OpenRLHF's command, with this worker."""
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(DeclaredKLActor)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    import declared_kl  # so that Ray's workers find the classes by this name

    declared_kl.main()
