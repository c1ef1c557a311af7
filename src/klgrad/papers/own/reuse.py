"""With the same sampled completions, several updates with each batch bring a student nearer to its teacher than one
update, and than TRL's own trainer.

The exact KL of a token needs no importance weights on completions of an earlier student, so a batch can be used again.
A student with 20 of SmolLM2-135M's 30 layers is trained towards the whole model with 40 batches of 256 completions,
each used for 1, 2, 4 or 8 updates, with 160 batches of 64, each used once or twice, or with
320 batches of 32, each used once. TRL's trainer uses a batch once;
it has the same student, prompts and evaluation, with three divergences. The rate and the schedule of every arm are
those that were best with one seed, by the KL on the student's completions, and it is judged by three others, seed by
seed. Design,
tables and limits: docs/experiments.md.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from ...drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings

# The figure of `reuse`: both KLs over completions and over updates.

ARMS = {
    "klgrad 1 256": ("1 use", SKY, "-"),
    "klgrad 2 256": ("2 uses", BLUE, "-"),
    "klgrad 4 256": ("4 uses", GREEN, "-"),
    "klgrad 8 256": ("8 uses", ORANGE, "-"),
    "trl-reverse 1 256": ("TRL, reverse KL", BLACK, "--"),
    "trl-forward 1 256": ("TRL, forward KL", GREY, "--"),
    "klgrad 1 64": ("1 use, batches of 64", SKY, ":"),
    "klgrad 2 64": ("2 uses, batches of 64", BLUE, ":"),
    "klgrad 1 32": ("1 use, batches of 32", PURPLE, ":"),
    "trl-reverse 1 64": ("TRL, reverse KL, batches of 64", BLACK, ":"),
}
"""Label, colour and line of an arm that is drawn: six in a panel; `trl-jsd` is in the tables alone."""
MANY_UPDATES = ("klgrad 4 256", "klgrad 8 256", "klgrad 1 64", "klgrad 2 64", "klgrad 1 32", "trl-reverse 1 64")
PANELS = {
    "completions": ("sampled completions", "batches of 256", tuple(arm for arm in ARMS if arm.endswith("256"))),
    "updates": ("updates", "arms with 160 or 320 updates", MANY_UPDATES),
}
"""What is below a column of panels, its title, and its arms."""
ROWS = {
    "kl_per_token": "KL(student‖teacher) per token,\non the student's completions, nats",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions, nats",
}


def draw(numbers: Numbers, figure: Figure) -> None:
    """Means over seeds after the first evaluation, with bars of one standard error; what has no runs is left out."""
    figure.set_size_inches(11, 8.4)
    axes = figure.subplots(len(ROWS), len(PANELS), sharey="row", sharex="col")
    for (column, label), row in zip(ROWS.items(), axes, strict=True):
        for (over, (_, title, arms)), axis in zip(PANELS.items(), row, strict=True):
            _lines(numbers, column, over, axis, arms)
            axis.set_title(f"{title}\n3 seeds, ± 1 SE", fontsize=9.5)
        row[0].set(ylabel=label, yscale="log")
        for formatter in (row[0].yaxis.set_major_formatter, row[0].yaxis.set_minor_formatter):
            formatter("{x:g}")
        for axis in row:
            axis.tick_params(which="both", labelsize=8)
    for axis, (name, *_) in zip(axes[-1], PANELS.values(), strict=True):
        axis.set_xlabel(name)
    named = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    # Handles so long that dots differ from dashes; three columns of the longest labels just fit.
    look = {"ncols": 3, "fontsize": 8.5, "handlelength": 3, "columnspacing": 1.2}
    figure.legend(named.values(), named.keys(), loc="outside lower center", **look)


def _lines(numbers: Numbers, column: str, over: str, axis: Axes, arms: tuple[str, ...]) -> None:
    """Without the evaluation before training, whose KL is several times as large."""
    for arm in arms:
        label, colour, line = ARMS[arm]
        if (path := numbers["paths"].get(arm)) is None:
            continue
        x = path[over][1:]
        mean, error = ([each[name] for each in path[column][1:]] for name in ("mean", "error"))
        look = {"fmt": line, "marker": "o", "ms": 4, "color": colour, "lw": 1.4, "capsize": 2}
        name = f"{label}, {numbers['settings'][arm]}"
        axis.errorbar(x, mean, yerr=error, label=name, **look)
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")


SCRIPT = "exp_reuse.py"
TRL = Experiment("reuse_trl.csv", SCRIPT, ("trl", "trl-seeds", "small-trl"))
EXPERIMENT = Experiment(
    "reuse_sweep.csv",
    SCRIPT,
    ("sweep", "small"),
    also=(Experiment("reuse_seeds.csv", SCRIPT, ("seeds", "small-seeds")), TRL),
)
PER_COMPLETION = "kl_per_sequence"
"""KL(student‖teacher) of whole completions: students differ in the length of theirs."""
COLUMNS = (*runs.COLUMNS, PER_COMPLETION)
BY_SEED = (
    "seed",
    *(f"{column}{end}" for column in (runs.OWN, runs.TEACHERS, runs.RIGHT) for end in ("", "_se")),
    PER_COMPLETION,
    "seconds",
)
"""What is kept of each run at its end."""
ALL, HALF = 10240, 5120
"""Sampled completions: those of a whole run, and those at which a run is compared with whole ones."""
WHOLE_BATCH = "256"
"""Completions of a batch, where a row does not have its size."""


def named(trainer: str, uses: int | str, size: int | str) -> str:
    """The name of an arm: whose trainer, with the divergence for TRL's; uses of each batch; completions of a batch."""
    return f"{trainer} {uses} {size}"


ONCE, TWICE, FOUR, EIGHT = (named("klgrad", uses, WHOLE_BATCH) for uses in (1, 2, 4, 8))
SMALL_ONCE, SMALL_TWICE = (named("klgrad", uses, 64) for uses in (1, 2))
SMALLEST = named("klgrad", 1, 32)
MEASURES = {runs.OWN: "on the student's completions", runs.TEACHERS: "on the teacher's completions"}
NEARER = {
    "2 uses end nearer than 1": (ONCE, TWICE),
    "4 uses end nearer than 1": (ONCE, FOUR),
    "8 uses end nearer than 1": (ONCE, EIGHT),
    "4 uses end nearer than 2": (TWICE, FOUR),
    "8 uses end nearer than 4": (FOUR, EIGHT),
    "1 use of batches of 64 ends nearer than 1 of batches of 256": (ONCE, SMALL_ONCE),
    "4 uses of batches of 256 end nearer than 1 of batches of 64, with as many updates": (SMALL_ONCE, FOUR),
    "8 uses of batches of 256 end nearer than 2 of batches of 64, with as many updates": (SMALL_TWICE, EIGHT),
    "1 use of batches of 32 ends nearer than 1 of batches of 64": (SMALL_ONCE, SMALLEST),
    "8 uses of batches of 256 end nearer than 1 of batches of 32, with as many updates": (SMALLEST, EIGHT),
}
"""The arm that should end farther from the teacher, and the one that should end nearer."""
REUSED = {"2": TWICE, "4": FOUR, "8": EIGHT}
CLOSE = 0.1
"""Two KLs are close if they differ by less than this share."""
TWICE_AS_LONG = 1.0
"""More, as a share."""


def run(settings: Settings) -> Numbers:
    """Every setting with the first seed, and every arm at its best setting with the others, over completions."""
    rows = _rows(settings)
    best = best_settings(rows)
    chosen = [row for row in rows if row["seed"] != runs.FIRST_SEED and best.get(arm_of(row)) == setting_of(row)]
    arms = runs.grouped(chosen, arm_of)
    return {
        "made": runs.provenance(rows),
        "start": {column: runs.at_start(rows, column) for column in COLUMNS},
        "settings": {arm: " ".join(setting) for arm, setting in best.items()},
        "sweep": _sweep(rows),
        "end": _at(arms, ALL),
        "half": _at(arms, HALF),
        "paths": {arm: _path(group) for arm, group in arms.items()},
    }


def _rows(settings: Settings) -> list[runs.Row]:
    """The evaluations of all files that are there; those of TRL's trainer may not have been made."""
    rows = runs.finite_rows(EXPERIMENT, settings)
    for other in EXPERIMENT.also:
        try:
            rows += runs.finite_rows(other, settings)
        except FileNotFoundError:
            continue
    return rows


def arm_of(row: runs.Row) -> str:
    """The name of a row's arm."""
    return named(row.get("trainer") or "klgrad", row["uses"], _size(row))


def _size(row: runs.Row) -> str:
    return row.get("completions") or WHOLE_BATCH


def setting_of(row: runs.Row) -> tuple[str, str]:
    """Learning rate and schedule."""
    return row["learning_rate"], row["schedule"]


def completions_of(row: runs.Row) -> int:
    """How many completions were sampled up to this evaluation."""
    return int(row["update"]) // int(row["uses"]) * int(_size(row))


def best_settings(rows: Iterable[runs.Row]) -> dict[str, tuple[str, str]]:
    """The setting with which each arm ends nearest, by its runs of the first seed that have ended."""
    ended = (row for row in rows if completions_of(row) == ALL)
    return {arm: setting_of(row) for arm, row in runs.nearest(ended, arm_of).items()}


def _sweep(rows: list[runs.Row]) -> dict[str, dict[str, float]]:
    """The last KL on the student's completions with the first seed, by arm and setting."""
    ends: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["seed"] == runs.FIRST_SEED and completions_of(row) == ALL:
            ends.setdefault(arm_of(row), {})[" ".join(setting_of(row))] = float(row[runs.OWN])
    return ends


def _at(arms: dict[str, list[runs.Row]], completions: int) -> Numbers:
    """All columns of every arm after so many completions, with the seconds of training."""
    by_arm = {}
    for arm, group in arms.items():
        if here := [row for row in group if completions_of(row) == completions]:
            by_arm[arm] = {column: runs.over_seeds(here, column) for column in COLUMNS} | {"seconds": _seconds(here)}
            by_arm[arm]["rows"] = [{name: row.get(name) or "" for name in BY_SEED} for row in here]
    return by_arm


def _seconds(rows: list[runs.Row]) -> runs.SeedMean | None:
    """None if a run was not timed."""
    return runs.over_seeds(rows, "seconds") if all(row.get("seconds") for row in rows) else None


def _path(rows: list[runs.Row]) -> Numbers:
    """Both KLs of an arm over the completions, with its updates."""
    path: Numbers = {name: [] for name in ("completions", "updates", runs.OWN, runs.TEACHERS)}
    for completions in sorted({completions_of(row) for row in rows}):
        here = [row for row in rows if completions_of(row) == completions]
        path["completions"].append(completions)
        path["updates"].append(int(here[0]["update"]))
        for column in (runs.OWN, runs.TEACHERS):
            path[column].append(runs.over_seeds(here, column))
    return path


def nearest_of_trl(end: Numbers, column: str) -> str | None:
    """The arm of TRL's trainer with the lowest mean; None without runs of it."""
    trl = [arm for arm in end if arm.startswith("trl")]
    return min(trl, key=lambda arm: end[arm][column]["mean"]) if trl else None


def check(numbers: Numbers) -> list[Check]:
    """Sentences by completions, by both KLs; then by right answers, by half of the completions, and by seconds."""
    checks = [each for measure, words in MEASURES.items() for each in _by_one_kl(numbers["end"], measure, words)]
    return [*checks, *_right_answers(numbers["end"]), *_with_half(numbers), *_by_seconds(numbers["end"])]


def _by_one_kl(end: Numbers, measure: str, words: str) -> Iterator[Check]:
    less = lambda farther, nearer: runs.paired_if_run(_rows_at(end, farther), _rows_at(end, nearer), measure)
    for claim, (farther, nearer) in NEARER.items():
        yield runs.exceeds_if_run(f"{claim}, {words}", less(farther, nearer))
    trl = nearest_of_trl(end, measure)
    for uses, arm in REUSED.items():
        yield runs.exceeds_if_run(f"{uses} uses end nearer than TRL's trainer, {words}", less(trl, arm))
    claim = f"1 use ends as near as TRL's reverse KL, within a tenth, {words}"
    same = named("trl-reverse", 1, WHOLE_BATCH)
    excess = runs.mean_of(runs.excess_by_seed(_rows_at(end, ONCE), _rows_at(end, same), measure), "excess")
    yield runs.equal_over_seeds(claim, excess, CLOSE) if excess else runs.exceeds_if_run(claim, None)


def _right_answers(end: Numbers) -> Iterator[Check]:
    less = lambda other: runs.paired_if_run(_rows_at(end, FOUR), _rows_at(end, other), runs.RIGHT)
    trl = [arm for arm in end if arm.startswith("trl")]
    yield runs.exceeds_if_run("4 uses answer more right than 1", less(ONCE))
    most = max(trl, key=lambda arm: end[arm][runs.RIGHT]["mean"]) if trl else None
    yield runs.exceeds_if_run("4 uses answer more right than TRL's trainer", less(most))


def _with_half(numbers: Numbers) -> Iterator[Check]:
    end = numbers["end"]
    others = {"1 use": ONCE, "TRL's trainer": nearest_of_trl(end, runs.OWN)}
    for (words, arm), uses in product(others.items(), ("4", "8")):
        claim = f"{uses} uses of half of the completions are nearer than {words} with all, {MEASURES[runs.OWN]}"
        half = _rows_at(numbers["half"], REUSED[uses])
        yield runs.exceeds_if_run(claim, runs.paired_if_run(_rows_at(end, arm), half, runs.OWN))


def _rows_at(by_arm: Numbers, arm: str | None) -> list[runs.Row]:
    """The runs of an arm; none for an arm without runs."""
    return by_arm[arm]["rows"] if arm in by_arm else []


def _by_seconds(end: Numbers) -> Iterator[Check]:
    """Of our own trainer alone: TRL's is run without what makes ours sample faster."""
    four, once = ([row for row in _rows_at(end, arm) if row.get("seconds")] for arm in (FOUR, ONCE))
    longer = runs.mean_of(runs.excess_by_seed(four, once, "seconds"), "excess")
    yield runs.below_if_run("4 uses take less than twice the seconds of 1", longer, TWICE_AS_LONG)
