"""Scalar logs of a run: one number per metric and step, as trainers and their loggers write them, and their names.

A value that was logged and is not finite is kept as it is, and is not the same as a step at which nothing was logged.
"""

import csv
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import LogError, MissingExtraError
from ..support import Json

STEPS = ("train/global_step", "trainer/global_step", "global_step", "step", "Step", "_step")
"""Names of the step, the first that a row has. wandb's `_step` counts calls, and may not be that of the trainer."""

TRAINER_STATE = "trainer_state.json"
EVENTS = "events.out.tfevents.*"
KINDS = f"{TRAINER_STATE}, a folder with TensorBoard's event files, or a .csv, .json or .jsonl file"


@dataclass(frozen=True)
class Series:
    """One metric: a value for each step, in ascending order; NaN and infinities are what the run logged."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> "Series":
        kept = [(s, x) for s, x in zip(self.steps, self.values, strict=True) if math.isfinite(x)]
        return Series(tuple(s for s, _ in kept), tuple(x for _, x in kept))

    def until(self, step: float) -> "Series":
        kept = [(s, x) for s, x in zip(self.steps, self.values, strict=True) if s <= step]
        return Series(tuple(s for s, _ in kept), tuple(x for _, x in kept))


@dataclass(frozen=True)
class ScalarLog:
    """The metrics of one run by name. `name` is the file or folder, and its run; `form` says who wrote it."""

    name: str
    form: str
    series: dict[str, Series]


def read_scalars(path: Path) -> list[ScalarLog]:
    """The runs in a file or folder: one, or those of a table that wandb exported.

    Read are `trainer_state.json`, a folder with it or with checkpoints or with event files of TensorBoard, such a file,
    a history that wandb exported as CSV or JSON, and JSON lines, as verl's file logger writes them.
    """
    if not path.exists():
        raise LogError("an existing file or folder", str(path), "check the path")
    if path.is_dir():
        return _read_folder(path)
    if ".tfevents." in path.name:
        return [_of_events([path], path)]
    readers = {".json": _read_json, ".jsonl": _read_lines, ".ndjson": _read_lines, ".csv": _read_table}
    if path.suffix.lower() not in readers:
        raise LogError(KINDS, str(path), "export the run's scalars as CSV or JSON")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise LogError("a log that can be read", f"{path}: {reason}", "check the file") from error
    return readers[path.suffix.lower()](text, path)


def _read_folder(path: Path) -> list[ScalarLog]:
    states = [path / TRAINER_STATE] if (path / TRAINER_STATE).is_file() else list(path.glob(f"*/{TRAINER_STATE}"))
    if states:  # each has the whole history up to its checkpoint
        return read_scalars(max(states, key=lambda state: _global_step(state)))
    if events := sorted(path.rglob(EVENTS)):
        return [_of_events(events, path)]
    others = [x for x in sorted(path.iterdir()) if x.suffix.lower() in (".jsonl", ".csv")]
    if len(others) == 1:
        return read_scalars(others[0])
    received = f"{path} with {len(others)} of them" if others else f"{path} with none of them"
    raise LogError(KINDS, received, "name the file")


def _global_step(state: Path) -> int:
    try:
        return int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
    except (ValueError, KeyError, TypeError):
        return -1  # a checkpoint that was cut off


def _read_json(text: str, path: Path) -> list[ScalarLog]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LogError("a JSON file", f"{path}: {error}", "write it again: it was cut off") from error
    if isinstance(data, dict) and isinstance(data.get("log_history"), list):
        return [_build(path, "the Trainer of transformers", _dicts(data["log_history"]))]
    if isinstance(data, list):
        return [_build(path, "a history as JSON records", _dicts(data))]
    if isinstance(data, dict) and data and all(isinstance(column, dict) for column in data.values()):
        rows: dict[str, Json] = {}
        for name, column in data.items():
            for index, value in column.items():
                rows.setdefault(index, {})[name] = value
        return [_build(path, "a history as JSON columns", rows.values())]
    raise LogError("log_history, a list of rows, or columns", f"{path} with others", "export the run's history")


def _dicts(rows: list[object]) -> list[Json]:
    return [row for row in rows if isinstance(row, dict)]


def _read_lines(text: str, path: Path) -> list[ScalarLog]:
    rows: list[Json] = []
    is_verl = False
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    for i, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == lines[-1][0] and rows:
                break  # a run that still writes, or was killed
            raise LogError("one JSON object per line", f"line {i} of {path}: {error}", "write it again") from error
        if not isinstance(row, dict):
            raise LogError("one JSON object per line", f"{type(row).__name__} in line {i} of {path}", "write objects")
        if isinstance(row.get("data"), dict):  # {"step": 3, "data": {...}}
            is_verl = True
            # orjson, with which verl writes, has null for NaN and infinities.
            data = {name: math.nan if value is None else value for name, value in row["data"].items()}
            row = {**data, "step": row.get("step")}
        rows.append(row)
    return [_build(path, "verl's file logger" if is_verl else "JSON lines", rows)]


def _read_table(text: str, path: Path) -> list[ScalarLog]:
    """A CSV of `run.history()`, or of a panel, whose columns are `RUN - METRIC` with their minima and maxima."""
    try:
        rows = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise LogError("a CSV file", f"{path}: {error}", "export it again") from error
    columns = [name for name in (rows[0] if rows else {}) if name and not name.endswith(("__MIN", "__MAX"))]
    runs = dict.fromkeys(name.split(" - ", 1)[0] for name in columns if " - " in name)
    if not runs:
        return [_build(path, "a history as CSV", rows)]
    logs = []
    for run in runs:
        columns_of_run = {name: name.split(" - ", 1)[1] for name in columns if name.startswith(f"{run} - ")}
        shared = [name for name in columns if " - " not in name]
        cut = [
            {**{x: row[x] for x in shared}, **{metric: row[x] for x, metric in columns_of_run.items()}} for row in rows
        ]
        logs.append(_build(path, "a panel of wandb as CSV", cut, run))
    return logs


def _of_events(files: list[Path], path: Path) -> ScalarLog:
    try:
        from tensorboard.backend.event_processing.event_file_loader import (  # pyright: ignore[reportMissingImports]
            EventFileLoader,
        )
        from tensorboard.util import tensor_util  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        received, remedy = "no such package", "pip install 'klgrad[tensorboard]', or export the scalars as CSV"
        raise MissingExtraError("tensorboard, to read its event files", received, remedy) from error
    metrics: dict[str, dict[float, float]] = {}
    for file in files:
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                # The loader turns the scalars of old writers into tensors of one number.
                array = tensor_util.make_ndarray(value.tensor) if value.HasField("tensor") else None
                if array is not None and array.size == 1 and array.dtype.kind in "fiu":
                    metrics.setdefault(value.tag, {})[float(event.step)] = float(array.reshape(()))
    return _finish(str(path), "TensorBoard", metrics)


def _build(path: Path, form: str, rows: Iterable[Json], run: str = "") -> ScalarLog:
    metrics: dict[str, dict[float, float]] = {}
    for i, row in enumerate(rows):
        step = next((x for name in STEPS if (x := _number(row.get(name))) is not None), float(i))
        for name, value in row.items():
            if name not in STEPS and (number := _number(value)) is not None:
                metrics.setdefault(name, {})[step] = number
    return _finish(f"{path}{f', {run}' if run else ''}", form, metrics)


def _finish(name: str, form: str, metrics: dict[str, dict[float, float]]) -> ScalarLog:
    if not metrics:
        raise LogError("numbers by step", f"{name} without any", "give the file that has the run's metrics")
    series = {}
    for metric, points in metrics.items():
        steps = sorted(points)
        series[metric] = Series(tuple(steps), tuple(points[s] for s in steps))
    return ScalarLog(name, form, series)


def _number(value: object) -> float | None:
    """A number, also as text, as wandb writes "NaN"; None for what is none, and for an empty cell."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


# What the metrics of trainers are, by their names: which KL, in which unit.

Unit = Literal["token", "completion", ""]


@dataclass(frozen=True)
class KLMetric:
    """A metric that is a KL to a reference.

    Attributes:
        name: its name in the log.
        unit: nats per token or per completion; empty if the name does not tell.
        remark: what else is to know of it.
        series: its values.
    """

    name: str
    unit: Unit
    remark: str
    series: Series


REFERENCE: dict[str, tuple[Unit, str]] = {
    "kl": ("", "TRL: k3 of GRPO and k1 of RLOO, per token. OpenRLHF, ms-swift and Tunix have the name too"),
    "actor/kl_loss": ("", "verl: per token with token-mean, per completion with seq-mean-token-sum; without β"),
    "actor/reward_kl_penalty": ("token", "verl: in the reward, without β"),
    "kl_penalty": ("token", "NeMo-RL: without β"),
    "kl_loss": ("", "slime and Tunix: a mean per completion of its tokens' mean, without β"),
    "policy_kl": ("token", "SkyRL: a mean per completion of its tokens' mean"),
    "ref_kl": ("token", "prime-rl: to the teacher"),
    "teacher_kl": ("token", "ms-swift: to the teacher"),
    "opd_reverse_kl": ("token", "slime: to the teacher"),
    "objective/kl": ("completion", "TRL's older PPO: a sum over the completion"),
    "distillation/loss": ("", "verl: to the teacher"),
    "kl/reverse/k1/per_token": ("token", "klgrad"),
    "kl/reverse/k3/per_token": ("token", "klgrad"),
    "kl/reverse/k1/per_sequence": ("completion", "klgrad"),
    "kl/reverse/k3/per_sequence": ("completion", "klgrad"),
}
"""By the end of the name: a prefix such as `train/` or `policy/` says where it was logged."""

TO_SAMPLER = re.compile(
    r"ppo_kl|approx_?kl|mismatch|rollout_corr|rollout_kl|gen_kl|policy_kl_error|sampling_logp|old_kl|behave|is_kl"
)
"""A KL between two of policy, sampler and policy before the update: no reference is in it."""

TIMES_BETA = {"kl_rewards": "AReaL: minus kl_ctl times the KL, so that it is negative where the KL is positive"}
OTHERS = re.compile(r"coef|target|clip|horizon|min|max|std|ratio|scale")
HELD_OUT = re.compile(r"^(eval|val|test|validation)[-_/]|^val-(core|aux)/")

LENGTHS = ("completions/mean_length", "response_length/mean", "length/mean", "completion_length", "response_len/mean")
COEFFICIENTS = ("actor/kl_coef", "actor/reward_kl_penalty_coeff", "kl/coef", "kl_coef", "kl_beta")
GRADIENTS = ("grad_norm",)
FLAT_GROUPS = ("frac_reward_zero_std",)
REWARDS = ("reward", "critic/score/mean", "critic/rewards/mean", "raw_reward", "rewards/mean")


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f"/{ending}")


def named(log: ScalarLog, endings: tuple[str, ...]) -> tuple[str, Series] | None:
    """The metric with one of these names, the first in their order, and not of held-out prompts."""
    for ending in endings:
        for name, series in log.series.items():
            if _ends(name.lower(), ending) and not HELD_OUT.match(name.lower()):
                return name, series
    return None


def reference_kls(log: ScalarLog) -> list[KLMetric]:
    """The KLs to a reference, those first whose unit is known."""
    metrics = []
    for name, series in log.series.items():
        plain = name.lower()
        endings = [ending for ending in REFERENCE if _ends(plain, ending)]
        if not endings or HELD_OUT.match(plain) or TO_SAMPLER.search(plain):
            continue
        unit, remark = REFERENCE[max(endings, key=len)]
        if plain in ("kl", "train/kl") and named(log, ("completions/mean_length",)):
            unit = "token"  # of TRL, whose two trainers divide by tokens alike
        metrics.append(KLMetric(name, unit, remark, series))
    return sorted(metrics, key=lambda metric: not metric.unit)


def sampler_kls(log: ScalarLog) -> list[str]:
    """The names of KLs in which there is no reference."""
    return [name for name in log.series if TO_SAMPLER.search(name.lower()) and not HELD_OUT.match(name.lower())]


def unrecognised_kls(log: ScalarLog) -> list[str]:
    """Names that may be of a KL and are not known."""
    known = {metric.name for metric in reference_kls(log)} | set(sampler_kls(log))
    like = [name for name in log.series if "kl" in re.split(r"[^a-z0-9]+", name.lower())]
    return [name for name in like if name not in known and not HELD_OUT.match(name) and not OTHERS.search(name.lower())]
