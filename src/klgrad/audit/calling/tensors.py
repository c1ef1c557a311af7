"""The tensor of a batch that an argument's name stands for."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...support.tensor_names import owner, plain, role_of
from ..batch import Batch

NAMES: dict[str, tuple[str, ...]] = {
    "advantages": ("advantages", "advantage", "adv", "advs"),
    "rewards": ("rewards", "reward"),
    "mask": ("attention_mask", "masks", "eos_mask", "valid_mask", "seq_mask", "sequence_mask"),
    "tokens": (
        *("tokens", "token_ids", "input_ids", "completion_ids", "response_ids", "responses", "output_ids", "ids"),
        *("action_ids", "actions", "sequences", "generated_ids", "sampled_ids", "sampled_tokens"),
    ),
    "labels": ("labels", "label", "shift_labels", "targets", "target", "target_ids"),
    "lengths": ("lengths", "completion_lengths", "response_lengths", "response_length", "seq_lens", "seq_lengths"),
    "token_reverse_kl": ("token_reverse_kl",),
    "token_forward_kl": ("token_forward_kl",),
}
"""Names of arguments that are not columns of a log, by role. There is no prompt, so `attention_mask` is the mask."""

LOGITS = {"logp": "logits", "ref_logp": "ref_logits", "behavior_logp": "behavior_logits"}
"""By the role of a policy's log-probs, that of its logits: `teacher_logits` are of the policy of `teacher_logp`."""

DESCRIBED = "logp, ref_logp, old_logp, behavior_logp, mask, advantages, rewards, group, tokens, logits, ref_logits"
"""The arguments of a loss by role, for messages."""

IGNORED = -100
"""The label of a masked token, as in `torch.nn.functional.cross_entropy`."""

PROMPT = 0
"""The token before the completion where a loss shifts its arguments itself."""


@dataclass(frozen=True)
class Form:
    """How a loss wants some of its tensors, which their names do not tell.

    Attributes:
        advantages: one per completion, (B,), or one per token, (B, T).
        mask: whether it is bool, of integers, or of the type of the log-probs.
        labels: the label of a masked token.
        layout: `aligned` where the logits at a position are those of the token there. `shifted` where they are those
            of the next token, with one prompt token in front: `logits[:, :-1]` belongs to `labels[:, 1:]`. `longer`
            where only the logits have a further position, after the last token.
    """

    advantages: Literal["completion", "token"] = "token"
    mask: Literal["bool", "int", "float"] = "bool"
    labels: int = IGNORED
    layout: Literal["aligned", "shifted", "longer"] = "aligned"


def argument_role(name: str) -> str | None:
    """The role of an argument by its name, or None."""
    if (found := role_of(name)) is not None:
        return found[0]
    name = plain(name)
    if name.endswith("logits"):
        policy = owner(name.removesuffix("logits").removeprefix("shift_"))
        return LOGITS.get(policy[0]) if policy else None
    return next((role for role, names in NAMES.items() if name in names), None)


def tensor(batch: Batch, role: str, form: Form) -> Tensor:
    """The tensor of a role, in the form that the loss wants."""
    shifted = form.layout == "shifted"
    if role == "advantages":
        return batch.advantages[:, 0] if form.advantages == "completion" else batch.advantages
    if role == "mask":
        types = {"bool": torch.bool, "int": torch.long, "float": batch.logp.dtype}
        return _after_prompt(batch.mask, False, shifted).to(types[form.mask])
    if role == "lengths":
        return batch.mask.sum(-1)
    if role == "tokens":
        return _after_prompt(batch.tokens, PROMPT, shifted)
    if role == "labels":
        return _after_prompt(torch.where(batch.mask, batch.tokens, form.labels), IGNORED, shifted)
    found: Tensor = getattr(batch, role)
    if role in LOGITS.values() and form.layout != "aligned":
        return torch.cat([found, found[:, -1:].detach().flip(-1)], 1)  # after the last token: any logits
    return found


def _after_prompt(x: Tensor, first: int | bool, shifted: bool) -> Tensor:
    return torch.cat([x.new_full((len(x), 1), first), x], 1) if shifted else x
