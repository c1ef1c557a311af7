"""What a run is unless it is told otherwise, by command, model and machine."""

from typing import Any

from .model import EMBEDDED as EMBEDDED_MODEL
from .settings import DEFAULTS, DISTILL, EMBEDDED, QUICK, QUICK_STUDENT, REUSED, STUDENT, UNGROUPED


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
    found |= QUICK_STUDENT if given.get("quick") else STUDENT if embedded else {}
    of_the_kl = {name for name in given if name.startswith("kl_")} - {"kl_coef", "kl_memory"}
    if embedded and "reward" not in given and not of_the_kl:
        found |= REUSED
    if given.get("kl_level") == "token":
        found.pop("kl_discount")  # there is no future to discount
    if given.get("kl_cell"):
        found = {name: x for name, x in found.items() if name not in ("kl_discount", "kl_estimator")}
    if "reward" not in given and given.get("kl_baseline", "none") == "none":
        found |= UNGROUPED
    return found


def here() -> dict[str, Any]:
    """What this machine asks for: TRL's default is bf16, which a CPU may not have."""
    import torch

    return {} if torch.cuda.is_available() else {"bf16": False, "use_cpu": True}
