"""Which column plays which role, under the names that frameworks write."""

import difflib
from collections.abc import Iterable, Sequence

from .errors import LogError

PER_TOKEN = ("logp", "ref_logp", "old_logp", "behavior_logp")
"""Roles with one number per token; `mask` has one too, `group` one per completion."""

NAMES: dict[str, tuple[str, ...]] = {
    "logp": (
        "logp",
        "per_token_logps",  # TRL
        "log_prob",  # verl
        "action_log_probs",  # OpenRLHF, SkyRL
        "trainer_logprobs",  # prime-rl
        "training_logprobs",  # tinker
        "pi_logprobs",  # torchtune
        "newlogprob",  # cleanrl
        "curr_logprobs",  # NeMo RL
        "current_logprobs",
        "policy_logprobs",
        "log_probs",
        "logprobs",
        "logps",
    ),
    "ref_logp": (
        "ref_logp",
        "ref_per_token_logps",
        "ref_log_prob",
        "ref_log_probs",
        "base_action_log_probs",
        "ref_logprobs",
        "base_logprobs",
        "reference_policy_logprobs",
        "reference_logprobs",
        "ref_logps",
        "teacher_logprobs",
        "teacher_log_probs",
        "teacher_logp",
    ),
    "old_logp": (
        "old_logp",
        "old_per_token_logps",
        "old_log_prob",
        "old_log_probs",
        "old_action_log_probs",
        "pi_old_logprobs",
        "b_logprobs",
        "prev_logprobs",
        "old_logprobs",
    ),
    "behavior_logp": (
        "behavior_logp",
        "behaviour_logp",
        "sampling_per_token_logps",
        "rollout_log_probs",
        "rollout_logprobs",
        "inference_logprobs",
        "sampling_logprobs",
        "generation_logprobs",
        "vllm_logprobs",
        "sampler_logprobs",
    ),
    # Not `attention_mask`: it marks prompts, too.
    "mask": ("mask", "completion_mask", "response_mask", "action_mask", "loss_mask", "token_mask"),
    "group": ("group", "group_id", "uid", "prompt_id", "prompt_index", "prompt_idx", "problem_id", "example_id"),
}
"""Names by role, in order of preference."""

REMEDY = "name it with --column {role}=NAME"


def assign(present: Sequence[str], chosen: dict[str, str]) -> dict[str, str]:
    """Role to column: what the user chose, else the first recognised name that is there.

    Without a column for `logp`, `old_logp` is taken: at the start of an update π is the old policy.
    """
    found = {}
    for role, names in NAMES.items():
        if role in chosen:
            found[role] = _chosen(role, chosen[role], present)
        else:
            at_hand = {name.lower(): name for name in present if name not in chosen.values()}
            match = next((at_hand[name] for name in names if name in at_hand), None)
            if match is not None:
                found[role] = match
    if "logp" not in found and "old_logp" in found:
        found["logp"] = found.pop("old_logp")
    for role in ("logp", "ref_logp"):
        if role not in found:
            raise _missing(role, present)
    return found


def parse_choices(choices: Iterable[str]) -> dict[str, str]:
    """`role=NAME` as the command takes it."""
    found = {}
    for choice in choices:
        role, equals, name = choice.partition("=")
        role = role.strip().replace("-", "_")
        if not equals or role not in NAMES or not name.strip():
            raise LogError(
                f"ROLE=NAME with a role of: {', '.join(NAMES)}",
                repr(choice),
                "write --column ref_logp=my_reference, say",
            )
        found[role] = name.strip()
    return found


def _chosen(role: str, name: str, present: Sequence[str]) -> str:
    if name in present:
        return name
    near = difflib.get_close_matches(name, present, n=3, cutoff=0.5)
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else REMEDY.format(role=role)
    raise LogError(f"a column {name!r} for `{role}`", f"columns {_listed(present)}", remedy)


def _missing(role: str, present: Sequence[str]) -> LogError:
    near = _nearest(role, present)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return LogError(
        f"a column of per-token log-probs for `{role}`, such as {', '.join(NAMES[role][:5])}",
        f"columns {_listed(present)}",
        hint + REMEDY.format(role=role),
    )


def _nearest(role: str, present: Sequence[str]) -> list[str]:
    """Columns by how much they look like any name of the role; names of other roles are no candidates."""
    taken = {name for other, names in NAMES.items() if other != role for name in names}
    score = {
        name: max(difflib.SequenceMatcher(None, name.lower(), known).ratio() for known in NAMES[role])
        for name in present
        if name.lower() not in taken
    }
    return sorted((name for name in score if score[name] >= 0.6), key=lambda name: -score[name])[:3]


def _listed(names: Sequence[str], most: int = 20) -> str:
    if not names:
        return "(none)"
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
