"""Frameworks that can be audited, where their code was read, their default settings, and their recorded audits.

Nothing here needs torch.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NotAuditableError

if TYPE_CHECKING:
    from ..audit import Subject


# Where the formulae of `klgrad.frameworks.transcribed` were read; without torch, which the names alone do not need.


@dataclass(frozen=True)
class Source:
    """Where a formula was read.

    Attributes:
        repository: on GitHub.
        version: the release.
        files: the files of that release that have the formula and its defaults.
    """

    repository: str
    version: str
    files: tuple[str, ...]


SOURCES = {
    "nemo-rl": Source(
        "NVIDIA-NeMo/RL", "0.7.0", ("nemo_rl/algorithms/utils.py", "nemo_rl/algorithms/loss/loss_functions.py")
    ),
    "prime-rl": Source("PrimeIntellect-ai/prime-rl", "0.8.0", ("src/prime_rl/trainer/rl/loss.py",)),
    "slime": Source("THUDM/slime", "0.3.1", ("slime/utils/ppo_utils.py", "slime/backends/megatron_utils/loss.py")),
    "open-instruct": Source(
        "allenai/open-instruct", "0.3.0", ("open_instruct/model_utils.py", "open_instruct/grpo_utils.py")
    ),
    "tinker-cookbook": Source(
        "thinking-machines-lab/tinker-cookbook",
        "0.5.8",
        ("tinker_cookbook/rl/metrics.py", "tinker_cookbook/distillation/train_on_policy.py"),
    ),
}


# The frameworks that can be audited; each has one adapter module that connects the audit to its code.


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        name: its name on the command line.
        distribution: the name of its installed package, or the repository of its source.
        tested: the version that its adapter was tested with, or that was transcribed.
        adapter: the module of this package with `subjects() -> list[Subject]`; empty if the formulae are transcribed.
        policy_adapter: that with `policy_losses() -> list[Subject]`; None if there is none yet.
    """

    name: str
    distribution: str
    tested: str
    adapter: str
    policy_adapter: str | None = None

    @property
    def transcribed(self) -> bool:
        """Whether formulae written again from its source are audited, and not its own code."""
        return self.name in SOURCES

    @property
    def version(self) -> str | None:
        """The version that an audit here is of: the transcribed one, or the installed one, or None."""
        return self.tested if self.transcribed else self.installed

    @property
    def title(self) -> str:
        """Its name and the version that an audit here is of, and whether that is its own code."""
        transcribed = f": formulae transcribed from {self.distribution}, not its own code"
        return f"{self.name} {self.version}{transcribed if self.transcribed else ''}"

    @property
    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def remark(self) -> str:
        """One line if the framework is missing or its version is not the tested one; empty otherwise."""
        if self.transcribed:
            return ""
        if self.installed is None:
            return f"{self.name} is not installed: pip install '{self.distribution}=={self.tested}'"
        if self.installed != self.tested:
            return f"{self.name} {self.installed} is not the tested version ({self.tested}); it is audited anyway"
        return ""

    def subjects(self) -> "list[Subject]":
        """Every setting that affects the KL, as losses to audit."""
        if self.transcribed:
            return import_module(".transcribed", __package__).subjects(self.name)
        return self._losses(self.adapter, "subjects")

    def policy_losses(self) -> "list[Subject]":
        """The whole policy losses of the framework, as losses to audit with `--whole`."""
        if self.policy_adapter is None:
            known = ", ".join(name for name, framework in FRAMEWORKS.items() if framework.policy_adapter)
            raise NotAuditableError(
                "a framework whose policy losses can be audited", self.name, f"use one of: {known}; or a file:function"
            )
        return self._losses(self.policy_adapter, "policy_losses")

    def _losses(self, module: str, function: str) -> "list[Subject]":
        if self.installed is None:
            raise NotAuditableError(
                f"{self.name} to be installed", self.remark, "install it in the environment of klgrad"
            )
        adapter: Callable[[], list[Subject]] = getattr(import_module(f".{module}", __package__), function)
        try:
            return adapter()
        except ImportError as error:
            raise NotAuditableError(
                f"{self.name} {self.installed} to import",
                f"{self.name} {self.installed} cannot be imported here: {error}",
                "install its missing dependency, or run the audit in an environment where it imports",
            ) from error


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("trl", "trl", "1.16.0", "trl", "trl"),
        Framework("verl", "verl", "0.9.1", "verl", "verl"),
        Framework("openrlhf", "openrlhf", "0.11.2", "openrlhf", "openrlhf"),
        Framework("skyrl", "skyrl", "0.3.0", "skyrl", "skyrl"),
        Framework("liger", "liger-kernel", "0.8.5", "liger"),
        Framework("ms-swift", "ms-swift", "4.6.0", "ms_swift"),
        Framework("unsloth", "unsloth_zoo", "2026.10.9", "unsloth"),
        Framework("trinity", "trinity-rft", "0.6.0", "trinity"),
        *(Framework(name, source.repository, source.version, "") for name, source in SOURCES.items()),
    )
}


# What each framework descends with its default settings, with the KL switched on where it is off by default.


@dataclass(frozen=True)
class Default:
    """The default settings of a framework, with a KL.

    Attributes:
        settings: the defaults in words.
        subject: the name of the audited loss that has these settings; its recorded audit says what it descends.
    """

    settings: str
    subject: str


DEFAULTS = {
    "trl": Default(
        "GRPO has beta=0.0, no KL; with beta alone raised",
        "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    ),
    "verl": Default(
        "no KL; with use_kl_loss=True alone",
        "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean",
    ),
    "openrlhf": Default(
        "k1 in the reward, advantages by gae",
        "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0",
    ),
    "skyrl": Default("k3 as a loss", "skyrl use_kl_loss kl_estimator_type=k3"),
    "liger": Default(
        "beta=0.04, k3 without bias correction",
        "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    ),
    "ms-swift": Default("k3 as a loss, beta=0.04", "ms-swift loss_type=grpo"),
    "unsloth": Default(
        "GRPO has beta=0.0, no KL; with beta alone raised, and TRL's use_bias_correction_kl",
        "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    ),
    "trinity": Default(
        "k2 as a loss, kl_coef=0.001",
        "trinity kl_loss_fn=k2 loss_agg_mode=token-mean",
    ),
    "nemo-rl": Default(
        "k3 as a loss, reference_policy_kl_penalty=0.01",
        "nemo-rl reference_policy_kl_type=k3 token_level_loss=True",
    ),
    "prime-rl": Default(
        "no reference; a squared log-ratio to the sampler, kl_tau=0.001",
        "prime-rl trainer.loss.type=default kl_tau",
    ),
    "slime": Default(
        "no KL; with --use-kl-loss alone",
        "slime --use-kl-loss --kl-loss-type k1",
    ),
    "open-instruct": Default(
        "k3 as a loss, beta=0.05",
        "open-instruct kl_estimator=2 loss_denominator=token",
    ),
    "tinker-cookbook": Default(
        "no KL; with kl_penalty_coef alone raised",
        "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0",
    ),
}


# Audits of the frameworks as they were when they were last made: one JSON file each, written by `make frameworks`.


@dataclass(frozen=True)
class Recorded:
    """The audit of one framework.

    Attributes:
        framework: its name.
        version: the version that was audited.
        date: when, as YYYY-MM-DD.
        columns: the headings of the table.
        rows: the cells of each setting, in words; the first is its name.
        verdicts: by name of the setting, its verdict on fresh and on stale samples, and where the first holds.
        policy_losses: the cells of each whole policy loss, as `klgrad audit NAME --whole` shows them.

    Example:
        >>> from klgrad.frameworks import recorded
        >>> recorded("trl").framework
        'trl'
    """

    framework: str
    version: str
    date: str
    columns: list[str]
    rows: list[list[str]]
    verdicts: dict[str, tuple[str, str, str | None]]
    policy_losses: list[list[str]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write it as FRAMEWORK.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{self.framework}.json").write_text(f"{text}\n", encoding="utf-8")


def recorded(framework: str) -> Recorded | None:
    """The recorded audit of a framework, or None if there is none."""
    file = files(__name__) / "records" / f"{framework}.json"
    if not file.is_file():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    return Recorded(**data | {"verdicts": {name: tuple(found) for name, found in data["verdicts"].items()}})
