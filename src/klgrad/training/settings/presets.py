"""Default settings by command, model and machine, where they differ from TRL's."""

from typing import Any

from ...models.embedded import EMBEDDED as EMBEDDED_MODEL

DEFAULTS: dict[str, Any] = {
    "logging_steps": 1,
    "save_steps": 50,
    "save_total_limit": 2,
    "disable_tqdm": True,
    "disable_dropout": True,  # dropout in the policy alone would add to the KL to the reference
}
"""For every model."""

EMBEDDED: dict[str, Any] = {
    "max_steps": 60,
    "learning_rate": 5e-6,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 32,
    "gradient_checkpointing": False,
    "kl_coef": 0.02,
}
"""For the embedded model: 32 prompts with 8 completions each per update."""

QUICK: dict[str, Any] = {
    **EMBEDDED,
    "max_steps": 10,
    "learning_rate": 1e-5,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 10,
    "save_steps": 5,
    "save_total_limit": 1,
    "weights_only": True,  # one has three times the size of the model
    "eval_every": 5,
    "eval_size": 12,
}
"""About ten minutes on a CPU: 8 prompts with 4 completions each per update."""

DISTILL: dict[str, Any] = {
    "kl_coef": 1.0,
    "kl_estimator": "exact",
    "kl_discount": 0.0,  # with discount 1 and a high learning rate a student learns to end early
    "teacher": EMBEDDED_MODEL,
}
"""For `klgrad distill`, where the KL is the whole objective."""

BATCHES = 40
"""Of completions, which a student of the embedded model samples, however often each is used."""

STUDENT: dict[str, Any] = {"learning_rate": 3e-4, "max_steps": BATCHES}
"""A student with two thirds of the layers is far from its teacher, and needs a high learning rate."""

REUSED: dict[str, Any] = {
    "num_iterations": 8,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
}
"""The same number of completions, with eight updates each: the nearest of what docs/experiments/reuse.md compares.

Summed over the vocabulary, the KL of a token needs no importance weights on completions of an earlier policy.
"""

QUICK_STUDENT: dict[str, Any] = {"learning_rate": 1e-4, "max_steps": 8, "save_steps": 4, "eval_every": 4}

QUICK_REUSED: dict[str, Any] = {
    "num_iterations": 2,
    "learning_rate": 2e-4,
    "max_steps": 12,
    "save_steps": 6,
    "eval_every": 6,
}
"""Few batches: eight updates with each would leave one or two."""

UNGROUPED: dict[str, Any] = {"num_generations": 2}
"""Without a reward nothing is compared within a group: use more prompts, with the fewest completions TRL allows."""


def preset_of(command: str, given: dict[str, Any]) -> dict[str, Any]:
    """The default settings of a command.

    Args:
        command: `train` or `distill`.
        given: settings from the command line and a file, which choose among the presets.

    Returns:
        Values by name; `given` takes precedence over them.

    Example:
        >>> preset_of("distill", {"quick": True})["max_steps"]
        12
    """
    model = (
        given.get("teacher", EMBEDDED_MODEL)
        if command == "distill"
        else given.get("model_name_or_path", EMBEDDED_MODEL)
    )
    embedded = str(model).partition(":")[0] == EMBEDDED_MODEL
    found = {**DEFAULTS, **(EMBEDDED if embedded else {})}
    if given.get("quick"):
        found |= QUICK
    if command == "distill":
        found = _distilling({**found, **DISTILL}, given, embedded)
    if "num_train_epochs" in given:
        found.pop("max_steps", None)  # otherwise TRL would ignore the epochs
    return found


def _distilling(found: dict[str, Any], given: dict[str, Any], embedded: bool) -> dict[str, Any]:
    if given.get("kl_level") == "token":
        found.pop("kl_discount")  # at token level there is no future to discount
    if given.get("kl_cell"):
        found = {name: x for name, x in found.items() if name not in ("kl_discount", "kl_estimator")}
    if "reward" not in given and given.get("kl_baseline", "none") == "none":
        found |= UNGROUPED
    reused = embedded and _reusable({**found, **given})
    if given.get("quick"):
        return found | (QUICK_REUSED if reused else QUICK_STUDENT)
    return found | (_reused(given) if reused else STUDENT if embedded else {})


def _reused(given: dict[str, Any]) -> dict[str, Any]:
    """With updates for all batches. A number of uses that is not valid is reported later."""
    uses = given.get("num_iterations")
    return {**REUSED, "max_steps": BATCHES * (uses if isinstance(uses, int) else REUSED["num_iterations"])}


def _reusable(chosen: dict[str, Any]) -> bool:
    """Whether the exact reverse KL of each token is the whole objective. The values are not checked yet."""
    other = ("reward", "kl_cell", "kl_top_k", "rollout_lag")
    plain = {"kl_estimator": "exact", "kl_divergence": "reverse", "kl_placement": "loss", "kl_baseline": "none"}
    as_usual = all(chosen.get(name, value) == value for name, value in plain.items())
    tokens = chosen.get("kl_level") == "token" or chosen.get("kl_discount") == 0
    wanted = chosen.get("num_iterations") != 1
    return as_usual and tokens and wanted and not any(chosen.get(name) for name in other)


def machine_settings() -> dict[str, Any]:
    """Settings of this machine: TRL's default is bf16, which a CPU may not support."""
    import torch

    return {} if torch.cuda.is_available() else {"bf16": False, "use_cpu": True}
