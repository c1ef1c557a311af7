"""All results by name."""

from importlib import import_module

from .study import Study

MODULES = {
    "tang-munos/fig1": "tang_munos.fig1_value",
    "tang-munos/fig2": "tang_munos.fig2_gradient",
    "tang-munos/fig3": "tang_munos.fig3_minimise",
    "tang-munos/fig4": "tang_munos.fig4_regularised",
    "tang-munos/fig5": "tang_munos.fig5_converged",
    "tang-munos/fig6": "tang_munos.fig6_which_optimum",
    "tang-munos/lambda": "tang_munos.k_lambda",
    "tang-munos/fig7": "tang_munos.fig7_frontier",
    "tang-munos/fig8": "tang_munos.fig8_language_model",
    "tang-munos/fig8-tabular": "tang_munos.fig8_sequences",
    "tang-munos/long-runs": "tang_munos.long_runs",
    "rethinking/fig1": "rethinking.fig1_coefficients",
    "rethinking/theorem-5.1": "rethinking.theorem_5_1",
    "rethinking/k3-bias": "rethinking.k3_bias",
    "rethinking/k3-variance": "rethinking.k3_variance",
    "rethinking/gaussian": "rethinking.gaussian",
    "rethinking/off-policy": "rethinking.off_policy",
    "rethinking/language-model": "rethinking.language_model",
    "comedy/synthetic": "comedy.synthetic",
    "comedy/off-policy": "comedy.off_policy",
    "comedy/on-policy": "comedy.on_policy",
    "comedy/asynchronous": "comedy.asynchronous",
    "frpo/kl-in-reward": "frpo.kl_in_reward",
    "asyncopd/stale-distillation": "asyncopd.stale_distillation",
    "klgrad/discount": "own.discount",
    "klgrad/reuse": "own.reuse",
    "schulman/table": "schulman.table",
}


def studies() -> dict[str, Study]:
    """All studies, in the order in which they are listed."""
    return {name: Study(name, import_module(f".{path}", __package__)) for name, path in MODULES.items()}
