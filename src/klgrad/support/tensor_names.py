"""The names that frameworks give to log-probs, masks and groups, in columns of logs and in arguments of losses."""

import re

WHOSE: dict[str, tuple[str, ...]] = {
    "logp": (
        *("policy", "pi", "trainer", "training", "train", "new", "curr", "current", "cur", "student"),
        *("actor", "learner", "model", "local", ""),
    ),
    "ref_logp": (
        *("ref", "reference", "ref_policy", "reference_policy", "ref_model", "base", "base_model"),
        *("anchor", "initial", "init", "frozen", "sft", "teacher"),
    ),
    "old_logp": ("old", "pi_old", "old_policy", "prev", "previous", "b", "prox", "proximal"),
    "behavior_logp": (
        *("behavior", "behaviour", "behavior_policy", "rollout", "inference", "infer", "sampling"),
        *("sampler", "generation", "generator", "gen", "vllm", "sglang", "engine", "mu"),
    ),
}
"""The words beside `logp`, `log_probs`, ... in a name, by role and in order of preference.

They cover TRL, verl, OpenRLHF, SkyRL, prime-rl, NeMo RL, slime, AReaL, ROLL, tinker, torchtune, open-instruct and
cleanrl.
"""

STEM = r"log_?p(?:rob|i)?s?"
BEFORE = re.compile(rf"(?P<whose>.*?)_?{STEM}$")
AFTER = re.compile(rf"{STEM}_(?P<whose>.+)$")
"""`ref_log_probs` and `log_probs_ref`; `log_pi` too."""

FILLER = re.compile(r"(^|_)(per_token|action|token)(?=_|$)")
"""Words that do not change the role: `ref_per_token_logps`, `base_action_log_probs`."""

# Without `attention_mask`, which is 1 at prompts too.
MASK = ("completion_mask", "response_mask", "action_mask", "loss_mask", "token_mask", "assistant_mask")

GROUP = (
    *("group", "group_id", "group_index", "uid", "prompt_id", "prompt_uid", "prompt_index", "prompt_idx"),
    *("problem_id", "question_id", "example_id", "task_id", "prompt"),
)

ROLES = (*WHOSE, "mask", "group")


def role_of(name: str) -> tuple[str, int] | None:
    """Find the role that a name stands for.

    Args:
        name: of a column of a log, or of an argument of a loss.

    Returns:
        The role and the priority of the name, where a lower one wins; None if the name is not recognised.

    Example:
        >>> from klgrad.support.tensor_names import role_of
        >>> role_of("ref_per_token_logps")
        ('ref_logp', 0)
        >>> role_of("reward") is None
        True
    """
    name = plain(name)
    if name in ROLES:
        return name, -1
    if name.removesuffix("s") in MASK:
        return "mask", MASK.index(name.removesuffix("s"))
    if name in GROUP:
        return "group", GROUP.index(name)
    stem = BEFORE.match(name) or AFTER.match(name)
    return None if stem is None else owner(stem["whose"])


def owner(words: str) -> tuple[str, int] | None:
    """The role of the policy that these words name, and their priority."""
    whose = FILLER.sub("", words).strip("_")
    return next(((role, known.index(whose)) for role, known in WHOSE.items() if whose in known), None)


def plain(name: str) -> str:
    """A name in lower case, with `_` for every other sign."""
    return re.sub(r"\W+", "_", name.lower()).strip("_")
