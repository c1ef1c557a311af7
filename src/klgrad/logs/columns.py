"""Finds the column of each role by the names that frameworks use."""

import difflib
from collections.abc import Iterable, Sequence

from ..support.tensor_names import ROLES, WHOSE, role_of
from .log_errors import LogError

PER_TOKEN = ("logp", "ref_logp", "old_logp", "behavior_logp")
"""Roles of log-probs: one number per token. `mask` also has one per token."""

PER_ROW = ("group", "by")
"""Roles with one value per completion: its prompt, and what a report is split by (`--by`)."""

REMEDY = "name it with --column {role}=NAME"

EXAMPLES = {
    "logp": ("logp", "per_token_logps", "log_prob", "action_log_probs", "trainer_logprobs"),
    "ref_logp": ("ref_logp", "ref_per_token_logps", "ref_log_prob", "base_action_log_probs", "reference_logprobs"),
}
"""Names that an error suggests for the two required roles."""


def assign(present: Sequence[str], chosen: dict[str, str]) -> dict[str, str]:
    """Assign columns to roles.

    Args:
        present: the names of all columns.
        chosen: role to column name, as the user chose it; an empty name leaves the role out.

    Returns:
        Role to column name: the chosen one, else the recognised name of the best priority. Without a column for `logp`,
        it is that of `old_logp`: at the start of an update π is the old policy.
    """
    best: dict[str, tuple[int, str]] = {}
    for name in present:
        if name not in chosen.values() and (recognised := role_of(name)) is not None:
            role, priority = recognised
            if role not in best or priority < best[role][0]:
                best[role] = priority, name
    found = {role: name for role, (_, name) in best.items() if role not in chosen}
    found |= {role: _chosen(role, name, present) for role, name in chosen.items() if name}
    if "logp" in found and not chosen.keys() & {"logp", "behavior_logp"} and _is_of_the_sampler(found):
        found["behavior_logp"] = found.pop("logp")
    if "logp" not in found and "old_logp" in found:
        found["logp"] = found.pop("old_logp")
    for role in ("logp", "ref_logp"):
        if role not in found:
            raise _missing(role, present)
    return {role: found[role] for role in (*ROLES, "by") if role in found}


def _is_of_the_sampler(found: dict[str, str]) -> bool:
    """AReaL names the trainer's recomputed log-probs `prox_logp`, and the sampler's log-probs just `logprobs`."""
    plain = found["logp"].lower() in ("logprobs", "logprob", "log_probs")
    return plain and found.get("old_logp", "").lower().startswith("prox") and "behavior_logp" not in found


def parse_choices(choices: Iterable[str]) -> dict[str, str]:
    """Parse `role=NAME`, as given to the command; `role=` leaves an optional role out."""
    found = {}
    for choice in choices:
        role, equals, name = choice.partition("=")
        role = role.strip().replace("-", "_")
        if not equals or role not in ROLES or (role in EXAMPLES and not name.strip()):
            raise LogError(
                f"ROLE=NAME with a role of: {', '.join(ROLES)}",
                repr(choice),
                "write for example --column ref_logp=my_reference; --column mask= leaves an optional column out",
            )
        found[role] = name.strip()
    return found


def another(role: str) -> str:
    """The remedy that names another column for a role, or none."""
    if role == "by":
        return "name another column with --by NAME"
    return f"name another column with --column {role}=NAME" + (f", or none with {role}=" * (role not in EXAMPLES))


def _chosen(role: str, name: str, present: Sequence[str]) -> str:
    if name in present:
        return name
    near = difflib.get_close_matches(name, present, n=3, cutoff=0.5)
    other = "name a column that there is with --by NAME" if role == "by" else REMEDY.format(role=role)
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else other
    raise LogError(f"a column {name!r} for `{role}`", f"columns {_listed(present)}", remedy)


def _missing(role: str, present: Sequence[str]) -> LogError:
    near = _nearest(role, present)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return LogError(
        f"a column of per-token log-probs for `{role}`, such as {', '.join(EXAMPLES[role])}",
        f"columns {_listed(present)}",
        hint + REMEDY.format(role=role),
    )


def _nearest(role: str, present: Sequence[str]) -> list[str]:
    """Up to three columns whose names are similar to a name of the role, without those recognised as another role."""
    known = {f"{word}_{stem}".strip("_") for word in WHOSE[role] for stem in ("logp", "logps", "logprobs", "log_probs")}
    score = {
        name: max(difflib.SequenceMatcher(None, name.lower(), like).ratio() for like in {*known, *EXAMPLES[role]})
        for name in present
        if (recognised := role_of(name)) is None or recognised[0] == role
    }
    return sorted((name for name in score if score[name] >= 0.6), key=lambda name: -score[name])[:3]


def _listed(names: Sequence[str], most: int = 20) -> str:
    if not names:
        return "(none)"
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
