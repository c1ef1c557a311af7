"""The public surface: a change here is a change for users."""

import inspect
import sys

import klgrad

NAMES = {
    "Clip", "KLResult", "KLTerm", "KlgradError", "Mask", "ImportanceWeighting", "Rollout", "Truncate",
    "consistency_loss", "forward_optimum", "kl_report", "mismatch_report", "optimum", "reverse_optimum",
    "squared_sequence", "audit", "credit", "divergences", "enumeration", "estimators", "importance", "kernels", "logs",
    "policy_losses", "reports", "testing", "trl", "verl", "zoo",
}  # fmt: skip


def test_completion_shows_the_public_names_and_nothing_else():
    assert set(dir(klgrad)) == {*NAMES, "__version__"}
    assert set(klgrad.__all__) == NAMES


def test_no_public_function_hides_a_module_of_its_name():
    for package in (
        "audit", "enumeration", "kernels", "logs", "policy_losses", "reports", "testing", "trl", "verl", "zoo",
    ):  # fmt: skip
        module = getattr(klgrad, package)
        for name, x in vars(module).items():
            if inspect.isfunction(x) and not name.startswith("_"):
                assert f"{module.__name__}.{name}" not in sys.modules, f"{package}.{name}"


def test_the_fields_of_a_term():
    fields = "divergence level estimator discount baseline weighting influence_bound reduction"
    assert list(inspect.signature(klgrad.KLTerm).parameters) == fields.split()
