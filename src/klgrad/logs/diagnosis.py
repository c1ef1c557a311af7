"""Scalar logs of one or several runs, as trainers and their loggers write them, and the symptoms that they show."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import correlation, fmean, median, stdev

from ..errors import LogError, MissingExtraError
from ..support import Json
from .symptoms import (
    SYMPTOMS,
    TIMES_BETA,
    Explanation,
    Fact,
    KLMetric,
    Symptom,
    other_metric,
    reference_kls,
    sampler_kls,
    threads_of,
    unrecognised_kls,
)

# Scalar logs: one number per metric and step. A value that was logged and is not finite is kept as it is, and is not
# the same as a step at which nothing was logged.

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
    def by_step(self) -> dict[float, float]:
        """The finite values."""
        return {step: x for step, x in zip(self.steps, self.values, strict=True) if math.isfinite(x)}

    @property
    def finite(self) -> "Series":
        return Series(tuple(self.by_step), tuple(self.by_step.values()))


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
    if path.suffix.lower() not in READERS:
        raise LogError(KINDS, str(path), "export the run's scalars as CSV or JSON")
    try:
        return READERS[path.suffix.lower()](path.read_text(encoding="utf-8-sig"), path)
    except LogError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:  # no text in UTF-8 and no JSON are ValueErrors
        raise LogError("a log that can be read", f"{path}: {error}", "write it again: it was cut off") from error


def _read_folder(path: Path) -> list[ScalarLog]:
    states = [path / TRAINER_STATE] if (path / TRAINER_STATE).is_file() else list(path.glob(f"*/{TRAINER_STATE}"))
    if states:  # each has the whole history up to its checkpoint
        return read_scalars(max(states, key=lambda state: (len(str(state)), str(state))))  # checkpoint-10 is after -2
    if events := sorted(path.rglob(EVENTS)):
        return [_of_events(events, path)]
    others = [x for x in sorted(path.iterdir()) if x.suffix.lower() in (".jsonl", ".csv")]
    if len(others) == 1:
        return read_scalars(others[0])
    received = f"{path} with {len(others)} of them" if others else f"{path} with none of them"
    raise LogError(KINDS, received, "name the file")


def _read_json(text: str, path: Path) -> list[ScalarLog]:
    data = json.loads(text)
    if isinstance(data, dict) and isinstance(data.get("log_history"), list):
        return [_build(path, "the Trainer of transformers", data["log_history"])]
    if isinstance(data, list):
        return [_build(path, "a history as JSON records", data)]
    if isinstance(data, dict) and data and all(isinstance(column, dict) for column in data.values()):
        rows: dict[str, Json] = {}
        for name, column in data.items():
            for index, value in column.items():
                rows.setdefault(index, {})[name] = value
        return [_build(path, "a history as JSON columns", rows.values())]
    raise LogError("log_history, a list of rows, or columns", f"{path} with others", "export the run's history")


def _read_lines(text: str, path: Path) -> list[ScalarLog]:
    rows: list[Json] = []
    is_verl = False
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    for i, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if i == lines[-1][0] and rows:
                break  # a run that still writes, or was killed
            row = None
        if not isinstance(row, dict):
            raise LogError("one JSON object per line", f"line {i} of {path} without one", "write the file again")
        if isinstance(row.get("data"), dict):  # {"step": 3, "data": {...}}
            is_verl = True
            # orjson, with which verl writes, has null for NaN and infinities.
            data = {name: math.nan if value is None else value for name, value in row["data"].items()}
            row = {**data, "step": row.get("step")}
        rows.append(row)
    return [_build(path, "verl's file logger" if is_verl else "JSON lines", rows)]


def _read_table(text: str, path: Path) -> list[ScalarLog]:
    """A CSV of `run.history()`, or of a panel, whose columns are `RUN - METRIC` with their minima and maxima."""
    rows = list(csv.DictReader(text.splitlines()))
    columns = [name for name in (rows[0] if rows else {}) if name and not name.endswith(("__MIN", "__MAX"))]
    runs = dict.fromkeys(name.split(" - ", 1)[0] for name in columns if " - " in name)
    if not runs:
        return [_build(path, "a history as CSV", rows)]
    logs = []
    for run in runs:
        of_run = [(name, name) for name in columns if " - " not in name]
        of_run += [(name, name.removeprefix(f"{run} - ")) for name in columns if name.startswith(f"{run} - ")]
        cut = [{metric: row[name] for name, metric in of_run} for row in rows]
        logs.append(_build(path, "a panel of wandb as CSV", cut, run))
    return logs


READERS = {".json": _read_json, ".jsonl": _read_lines, ".ndjson": _read_lines, ".csv": _read_table}


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
    for i, row in enumerate(row for row in rows if isinstance(row, dict)):
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


# The symptoms of the runs.

FEWEST = 8
"""Values below which no spread is measured."""

FAR, TIMES = 8.0, 3.0
"""A spike is this many robust deviations away and this many times its neighbours. Either alone is common: a calm series
has tiny deviations, and near 0 every ratio is large."""

AROUND = 5
"""Neighbours on each side."""


@dataclass(frozen=True)
class RunConfiguration:
    """What the configuration of a run says: β if there is one, what settles causes, and the same in words.

    `never_negative`: the logged estimate cannot be negative.
    """

    beta: float | None = None
    facts: frozenset[Fact] = frozenset()
    lines: tuple[str, ...] = ()
    never_negative: bool = False


@dataclass(frozen=True)
class Observation:
    """A symptom that was seen, the numbers that show it, and the facts of the configuration of its run."""

    symptom: Symptom
    evidence: str
    facts: frozenset[Fact] = frozenset()

    @property
    def causes(self) -> list[tuple[Explanation, bool]]:
        """The causes, and whether the configuration settles each; those that it settles come first."""
        causes = [(cause, bool(self.facts.intersection(cause.facts))) for cause in self.symptom.causes]
        return sorted(causes, key=lambda pair: not pair[1])

    def to_dict(self) -> Json:
        return {
            "symptom": self.symptom.name,
            "title": self.symptom.title,
            "evidence": self.evidence,
            "causes": [
                {"cause": c.what, "decides": c.decides, "cure": c.cure, "settled_by_configuration": settled}
                for c, settled in self.causes
            ],
            "threads": list(threads_of(self.symptom.name)),
        }


@dataclass(frozen=True)
class RunDiagnosis:
    """What one run shows: the KL to a reference that was looked at, if there is one, and the symptoms.

    `level` is the mean of the KL over the last quarter and its standard error; `lines` say what was read.
    """

    log: ScalarLog
    kl: KLMetric | None
    level: tuple[float, float] | None
    lines: tuple[str, ...]
    observations: tuple[Observation, ...]
    beta: float | None = None

    def to_dict(self) -> Json:
        kl = self.kl and {"name": self.kl.name, "unit": self.kl.unit, "remark": self.kl.remark}
        level = dict(zip(("mean", "standard_error"), self.level, strict=True)) if self.level else None
        return {
            "run": self.log.name,
            "format": self.log.form,
            "kl": kl,
            "beta": self.beta,
            "last_quarter": level,
            "notes": list(self.lines),
            "symptoms": [seen.to_dict() for seen in self.observations],
        }


@dataclass(frozen=True)
class Diagnosis:
    """What the runs show, singly and compared."""

    runs: tuple[RunDiagnosis, ...]
    compared: tuple[Observation, ...] = ()
    lines: tuple[str, ...] = field(default=())

    @property
    def observations(self) -> list[Observation]:
        return [*(seen for run in self.runs for seen in run.observations), *self.compared]

    def to_dict(self) -> Json:
        runs = [run.to_dict() for run in self.runs]
        return {"runs": runs, "compared": [seen.to_dict() for seen in self.compared], "notes": list(self.lines)}


def diagnose(logs: Sequence[ScalarLog], configurations: Sequence[RunConfiguration] = (), kl: str = "") -> Diagnosis:
    """Look for every symptom in each run, and compare the runs.

    There is no configuration, one for all runs, or one for each. `kl` names the metric that is the KL; empty for one
    that is known by its name.
    """
    if len(configurations) not in (0, 1, len(logs)):
        received = f"{len(configurations)} for {len(logs)} runs"
        raise LogError("a configuration or β for all runs, or one for each", received, "give them in the runs' order")
    per_run = list(configurations) or [RunConfiguration()]
    per_run = per_run * len(logs) if len(per_run) == 1 else per_run
    runs = tuple(_diagnose_run(log, of, kl) for log, of in zip(logs, per_run, strict=True))
    compared, lines = _compare(runs, frozenset[Fact]().union(*(of.facts for of in per_run)))
    return Diagnosis(runs, tuple(compared), tuple(lines))


def _diagnose_run(log: ScalarLog, configuration: RunConfiguration, name: str) -> RunDiagnosis:
    metrics = reference_kls(log)
    if name:
        if name not in log.series:
            raise LogError(f"a metric of {log.name}", name, f"it has {', '.join(sorted(log.series))}")
        known = [metric for metric in metrics if metric.name == name]
        metrics = known or [KLMetric(name, "", "as named by --kl", log.series[name])]
    lines, symptoms = list(configuration.lines), []
    kl = metrics[0] if metrics else None
    level = None
    beta = configuration.beta
    if beta is None and (coefficient := other_metric(log, "coefficient")):
        values = set(coefficient[1].finite.values)
        beta = values.pop() if len(values) == 1 else None
    if kl is not None:
        values = kl.series.finite.values
        level = _mean(_last(values)) if len(values) >= FEWEST else None
        lines += _described(kl, level, log)
        lines += [f"Also to a reference: {other.name}." for other in metrics[1:]]
        later = values[1:]
        zeros = sum(x == 0 for x in later)
        if is_zero := bool(later) and zeros >= len(later) / 2:
            text = f"{kl.name} is 0 to the last bit in {zeros} of {len(later)} values after the first."
            symptoms.append(("zero", text))
        symptoms += _not_finite(kl.name, kl.series)
        if not is_zero:
            symptoms += [*_negative(kl, configuration.never_negative), *(spikes := list(_spikes(kl, log)))]
            symptoms += _rises(kl) if not spikes else ()
        symptoms += _units(metrics, log)
    elif others := sampler_kls(log):
        symptoms.append(("other-kl", f"{', '.join(others)}: KLs to the sampler or to the policy before the update."))
    else:
        others = unrecognised_kls(log)
        lines.append(f"No KL that is known by its name; name one by --kl: {', '.join(others)}." if others else NO_KL)
    if others := sampler_kls(log):
        lines.append(f"Not to a reference, and left out: {', '.join(others)}.")
    lines += [f"{x}: {TIMES_BETA[x.split('/')[-1]]}." for x in log.series if x.split("/")[-1] in TIMES_BETA]
    if gradient := other_metric(log, "gradient"):
        symptoms += _not_finite(*gradient)
        values = gradient[1].finite.values
        zeros = sum(x == 0 for x in values)
        if len(values) >= FEWEST and zeros >= len(values) / 5:
            symptoms.append(("zero-gradient", f"{gradient[0]} is 0 to the last bit in {zeros} of {len(values)} steps."))
    if flat := other_metric(log, "flat groups"):
        values = flat[1].finite.values
        if len(values) >= FEWEST and (share := median(_last(values))) >= 0.5:
            symptoms.append(("flat-groups", f"{flat[0]} is {share:.0%} over the last quarter."))
    if wired := configuration.facts & {"unread", "both", "ignores-ref", "climbs"}:
        symptoms.append(("wiring", f"The configuration says so: {', '.join(sorted(wired))}."))
    observations = tuple(Observation(SYMPTOMS[symptom], text, configuration.facts) for symptom, text in symptoms)
    return RunDiagnosis(log, kl, level, tuple(lines), observations, beta)


NO_KL = (
    "No KL is in this log. At a coefficient of 0 most trainers load no reference and log none; KLCallback of "
    "klgrad.trl measures it all the same."
)

Seen = Iterator[tuple[str, str]]
"""Names of symptoms, and the numbers."""


def _described(kl: KLMetric, level: tuple[float, float] | None, log: ScalarLog) -> Iterator[str]:
    unit = {"token": "nats per token", "completion": "nats per completion", "": "in a unit that its name does not tell"}
    yield f"{kl.name}: {len(kl.series.values)} values, {unit[kl.unit]} ({kl.remark})."
    if level is None:
        return
    text = f"Last quarter: {level[0]:.4g} ± {level[1]:.2g}"
    length = other_metric(log, "length")
    mean = fmean(_last(length[1].finite.values)) if length and length[1].finite.values else 0
    if mean and kl.unit:
        other = level[0] * mean if kl.unit == "token" else level[0] / mean
        whole = "completion" if kl.unit == "token" else "token"
        text += f"; with {mean:.4g} tokens per completion, about {other:.3g} nats per {whole}"
    yield f"{text}."


# Statistics of a series. Its values are correlated, so that errors are of means of blocks.


def _last(values: Sequence[float]) -> Sequence[float]:
    return values[-max(len(values) // 4, 1) :]


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, by the means of at most 8 blocks."""
    blocks = min(8, len(values))
    edges = [round(i * len(values) / blocks) for i in range(blocks + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    return fmean(values), stdev(means) / math.sqrt(blocks)


# The symptoms of one run.


def _not_finite(name: str, series: Series) -> Seen:
    steps = [step for step, x in zip(series.steps, series.values, strict=True) if not math.isfinite(x)]
    if steps:
        yield "nan", f"{name}: {len(steps)} of {len(series.values)} values, the first at step {steps[0]:g}."


def _negative(kl: KLMetric, never: bool) -> Seen:
    series = kl.series.finite
    low, step = min(zip(series.values, series.steps, strict=True), default=(0.0, 0.0))
    if never and low < -1e-6:
        yield "negative", f"{kl.name} is {low:.4g} at step {step:g}; the estimate of this run cannot be negative."
        return
    if len(series.values) < FEWEST:
        return
    for part, values in (("the run", series.values), ("its second half", series.values[len(series.values) // 2 :])):
        mean, error = _mean(values)
        if mean < -3 * error:
            share = sum(x < 0 for x in values) / len(values)
            yield "negative", f"{kl.name}: {mean:.4g} ± {error:.2g} over {part}; {share:.0%} of its values are below 0."
            return


def _spikes(kl: KLMetric, log: ScalarLog) -> Seen:
    """Spikes, or one jump after which it stays."""
    series = kl.series.finite
    values, n = series.values, len(series.values)
    if n < 2 * AROUND + 1:
        return
    around = [median([*values[max(i - AROUND, 0) : i], *values[i + 1 : i + 1 + AROUND]]) for i in range(n)]
    residuals = (abs(x - m) for x, m in zip(values, around, strict=True))
    spread = max(1.4826 * median(residuals), 1e-12)  # the standard deviation, if the law is normal
    rest = list(accumulate(reversed(values), min))[::-1]  # the least of what is left of the run
    for i in range(AROUND, n - AROUND + 1):
        top = max(values[i - AROUND : i])
        if rest[i] > TIMES * top and rest[i] - top > FAR * spread:
            before, after = fmean(values[i - AROUND : i]), fmean(values[i : i + AROUND])
            text = f"{kl.name} goes from {before:.4g} to {after:.4g} at step {series.steps[i]:g}, and stays"
            yield "jump", f"{text}{_rewards_at(series.steps[i], log)}."
            return
    spikes = [i for i in range(n) if values[i] - around[i] > FAR * spread and values[i] > TIMES * abs(around[i])]
    if spikes:
        i = max(spikes, key=lambda i: values[i])
        count = f"{len(spikes)} spike{'s' * (len(spikes) > 1)}"
        where = f"{values[i]:.4g} at step {series.steps[i]:g}, where its neighbours have {around[i]:.4g}"
        yield "spike", f"{kl.name} has {count}; the largest is {where}."


def _rewards_at(step: float, log: ScalarLog) -> str:
    reward = other_metric(log, "reward")
    if reward is None:
        return ""
    name, points = reward[0], reward[1].by_step.items()
    before, after = [x for s, x in points if s < step][-AROUND:], [x for s, x in points if s >= step][:AROUND]
    return f"; {name} goes from {fmean(before):.4g} to {fmean(after):.4g}" if before and after else ""


def _rises(kl: KLMetric) -> Seen:
    values = kl.series.finite.values
    if len(values) < 2 * FEWEST:
        return
    sample = values[:: max(len(values) // 200, 1)]
    pairs = list(combinations(sample, 2))
    in_order = sum(b > a for a, b in pairs) / len(pairs)
    quarter = len(values) // 4
    second, last = median(values[quarter : 2 * quarter]), median(_last(values))
    if in_order >= 0.8 and last > TIMES * abs(second):
        text = f"{kl.name} is {second:.4g} in the second quarter and {last:.4g} in the last"
        yield "rising", f"{text}; {in_order:.0%} of pairs rise."


def _units(metrics: list[KLMetric], log: ScalarLog) -> Seen:
    metric = other_metric(log, "length")
    if metric is None:
        return
    name, lengths = metric[0], metric[1].by_step
    for one, other in combinations(metrics, 2):
        ratio, mean = _ratio(one, other, lengths)
        if mean > 2 and 0.75 < ratio / mean < 1.33:
            larger, smaller = (one, other) if _level(one) > _level(other) else (other, one)
            text = f"{larger.name} is {ratio:.4g} times {smaller.name}, and {name} is {mean:.4g}"
            yield "units", f"{text}: a sum per completion beside a mean per token."
    for metric in metrics[:1]:
        if metric.unit != "token" and (r := _moves_with(metric.series, lengths)) > 0.8:
            yield "units", f"{metric.name} moves with {name} from step to step (correlation {r:.2f}): a sum."


def _level(metric: KLMetric) -> float:
    return abs(median(metric.series.finite.values or (0.0,)))


def _ratio(one: KLMetric, other: KLMetric, lengths: dict[float, float]) -> tuple[float, float]:
    a, b = one.series.by_step, other.series.by_step
    both = [(abs(a[s]), abs(b[s]), lengths[s]) for s in a if s in b and s in lengths and a[s] and b[s]]
    if len(both) < FEWEST:
        return 0.0, 0.0
    return median(max(x, y) / min(x, y) for x, y, _ in both), median(n for *_, n in both)


def _moves_with(series: Series, lengths: dict[float, float]) -> float:
    """The correlation of the changes of the logs, which a common trend does not make."""
    both = [(x, lengths[s]) for s, x in series.by_step.items() if s in lengths]
    if len(both) < 2 * FEWEST or min(min(pair) for pair in both) <= 0:
        return 0.0
    changes = [(math.log(b[0] / a[0]), math.log(b[1] / a[1])) for a, b in pairwise(both)]
    x, y = zip(*changes, strict=True)
    return correlation(x, y) if len(set(x)) > 1 < len(set(y)) else 0.0


# Several runs.


def _compare(runs: tuple[RunDiagnosis, ...], facts: frozenset[Fact]) -> tuple[list[Observation], list[str]]:
    """Runs with one KL and different β, at the last step that all of them have."""
    usable = [(run.beta, run.kl) for run in runs if run.kl and run.level and run.beta]
    usable.sort(key=lambda run: run[0])
    if len(runs) < 2:
        return [], []
    if len({beta for beta, _ in usable}) < 2:
        return [], ["To compare the runs, give their coefficients: --beta or --config once for each, in their order."]
    if len({kl.name for _, kl in usable}) > 1:
        return [], ["The runs have KLs of different names, and are not compared: name one by --kl."]
    end = min(kl.series.steps[-1] for _, kl in usable)
    levels = []
    for beta, kl in usable:
        values = [x for step, x in kl.series.by_step.items() if step <= end]
        if len(values) < FEWEST:
            return [], ["The runs have too few steps in common to be compared."]
        levels.append((beta, *_mean(_last(values))))
    table = ", ".join(f"{mean:.4g} ± {error:.2g} at β = {beta:g}" for beta, mean, error in levels)
    lines = [f"KL of the last quarter up to step {end:g}: {table}."]
    (low, first, e), (high, last, f) = levels[0], levels[-1]
    error = math.hypot(e, f)
    ordered = all(b[1] > a[1] - 2 * math.hypot(a[2], b[2]) for a, b in pairwise(levels))
    name = ""
    if last - first > 3 * error and last > 1.2 * first and ordered:
        name = "rising-with-beta"
    elif high >= 2 * low and all(
        abs(a[1] - b[1]) <= max(2 * math.hypot(a[2], b[2]), 0.1 * abs(a[1])) for a, b in combinations(levels, 2)
    ):
        name = "constant"
    return [Observation(SYMPTOMS[name], lines[0], facts)] if name else [], [] if name else lines
