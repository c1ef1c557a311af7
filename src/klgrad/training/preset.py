"""What a run is unless it is told otherwise, by command, model and machine."""

from typing import Any

from .model import EMBEDDED as EMBEDDED_MODEL
from .settings import DEFAULTS, DISTILL, EMBEDDED, QUICK, QUICK_REUSED, QUICK_STUDENT, REUSED, STUDENT, UNGROUPED


def preset_of(command: str, given: dict[str, Any]) -> dict[str, Any]:
    """For a command, and what was said to it."""
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
        found.pop("max_steps", None)  # which would win over it
    return found


def _distilling(found: dict[str, Any], given: dict[str, Any], embedded: bool) -> dict[str, Any]:
    if given.get("kl_level") == "token":
        found.pop("kl_discount")  # there is no future to discount
    if given.get("kl_cell"):
        found = {name: x for name, x in found.items() if name not in ("kl_discount", "kl_estimator")}
    if "reward" not in given and given.get("kl_baseline", "none") == "none":
        found |= UNGROUPED
    reused = embedded and _reusable({**found, **given})
    if given.get("quick"):
        return found | (QUICK_REUSED if reused else QUICK_STUDENT)
    return found | (REUSED if reused else STUDENT if embedded else {})


def _reusable(chosen: dict[str, Any]) -> bool:
    """Whether the reverse KL of each token, over the vocabulary, is all there is. Nothing is checked yet."""
    other = ("reward", "kl_cell", "kl_top_k", "rollout_lag")
    plain = {"kl_estimator": "exact", "kl_divergence": "reverse", "kl_placement": "loss", "kl_baseline": "none"}
    as_usual = all(chosen.get(name, value) == value for name, value in plain.items())
    tokens = chosen.get("kl_level") == "token" or chosen.get("kl_discount") == 0
    wished = chosen.get("num_iterations") != 1
    return as_usual and tokens and wished and not any(chosen.get(name) for name in other)


def here() -> dict[str, Any]:
    """What this machine asks for: TRL's default is bf16, which a CPU may not have."""
    import torch

    return {} if torch.cuda.is_available() else {"bf16": False, "use_cpu": True}
