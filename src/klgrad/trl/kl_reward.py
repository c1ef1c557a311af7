"""The KL as a reward function of TRL's, and the absence of one."""

from typing import Any

import torch
from torch import Tensor

from ..core.rollout import Rollout
from .gather import everywhere
from .metrics import record
from .model_forward import refuse_images


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """0: the KL is all there is, as in distillation."""
    return [0.0] * len(completions)


class KLReward:
    """log π - log ref of each completion, at the policy that sampled it; TRL subtracts β times it.

    TRL logs it as `rewards/kl_to_reference/mean`.
    """

    __name__ = "kl_to_reference"

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __call__(self, **_: Any) -> list[float]:
        """One number per completion that TRL has just sampled."""
        from .model_forward import reference

        trainer = self.trainer
        prompts, completions, tools, *_rest, images, _tool_images = trainer._last_made
        refuse_images(images is not None, "kl_placement='reward'")
        batch = padded(trainer, prompts, completions)
        mask = batch["completion_mask"]
        if tools is not None:  # what a tool said the policy did not sample
            mask = mask * padded(trainer, prompts, tools)["completion_ids"]
        own = trainer.score(trainer.model, batch)
        with reference(trainer) as ref:
            other = trainer.score(ref, batch)
        self._record(own, other, mask)
        return ((own - other) * mask).sum(-1).tolist()

    def _record(self, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> None:
        """What the other placements log from their losses; β, where it is adapted, is TRL's weight of this reward."""
        trainer = self.trainer
        local: dict[str, Tensor | None] = {"logp": logp, "ref_logp": ref_logp, "mask": mask}
        tensors, _ = everywhere(trainer.accelerator, {**local, "group": trainer.groups(len(mask))})
        group = tensors.pop("group")
        rollout = Rollout(**tensors)
        trainer.check_start(rollout)
        # What it was for these completions; what it becomes is for the next.
        trainer.reward_weights[trainer.reward_funcs.index(self)] = -trainer.coefficient.value
        record(trainer, rollout, group, None, last=not trainer.evaluating)  # for an update it comes as one batch


def padded(trainer: Any, prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    """Token ids as TRL's own batches have them."""
    from trl.trainer.utils import pad

    device, made = trainer.accelerator.device, {}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        made[f"{name}_ids"] = pad(ids, padding_value=trainer._tokenizer.pad_token_id, padding_side=side).to(device)
        made[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side).to(device)
    return made
