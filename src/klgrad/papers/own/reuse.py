"""With the same sampled completions, several updates with each batch bring a student nearer to its teacher than one
update, and 8 updates nearer than TRL's own trainer.

A student with 20 of SmolLM2-135M's 30 layers is trained towards the whole model with batches of 256, 64 or 32
completions, 10,240 in all, each used for 1 to 8 updates. TRL's trainer uses a batch once, with three divergences. The
rate and the schedule of every arm are those that were best with one seed, by the KL on the student's completions, and
it is judged by three others, seed by seed. Design, tables and limits: docs/experiments/stale-distillation.md.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from ...drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, columns

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
    "trl-reverse 1 32": ("TRL, reverse KL, batches of 32", BLACK, ":"),
}
"""Label, colour and line of an arm that is drawn: six in a panel; `trl-jsd` is in the tables alone."""
MANY_UPDATES = ("klgrad 4 256", "klgrad 8 256", "klgrad 1 64", "klgrad 2 64", "klgrad 1 32", "trl-reverse 1 32")
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
        row[0].set_ylabel(label)
        for axis in row:
            runs.logarithmic(axis)
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
        mean, error = columns(path[column][1:], "mean", "error")
        look = {"fmt": line, "marker": "o", "ms": 4, "color": colour, "lw": 1.4, "capsize": 2}
        name = f"{label}, {numbers['settings'][arm]}"
        axis.errorbar(x, mean, yerr=error, label=name, **look)


SCRIPT = "exp_reuse.py"
TRL = Experiment("reuse_trl.csv", SCRIPT, ("trl", "trl-seeds", "small-trl"))
EXPERIMENT = Experiment(
    "reuse_sweep.csv",
    SCRIPT,
    ("sweep", "small"),
    also=(Experiment("reuse_seeds.csv", SCRIPT, ("seeds", "small-seeds")), TRL),
)
ARM = "{trainer} {uses} {completions}"
PER_COMPLETION = "kl_per_sequence"
"""KL(student‖teacher) of whole completions: students differ in the length of theirs."""
COLUMNS = (*runs.COLUMNS, PER_COMPLETION)
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
    rows = [row for each in (EXPERIMENT, *EXPERIMENT.also) for row in labelled(runs.finite_rows(each, settings))]
    best, ended = best_settings(rows), [row for row in rows if completions_of(row) == ALL]
    arms = runs.grouped(
        (row for row in rows if row["seed"] != runs.FIRST_SEED and best.get(ARM.format_map(row)) == setting_of(row)),
        ARM,
    )
    first = runs.grouped((row for row in ended if row["seed"] == runs.FIRST_SEED), ARM)
    return {
        "made": runs.provenance(rows),
        "settings": best,
        "sweep": {arm: {setting_of(row): row[runs.OWN] for row in group} for arm, group in first.items()},
        "end": _at(arms, ALL),
        "half": _at(arms, HALF),
        "paths": {arm: _path(group) for arm, group in arms.items()},
    }


def labelled(rows: Iterable[runs.Row]) -> list[runs.Row]:
    """The rows with their trainer and size of a batch, which the first runs do not have."""
    defaults = {"trainer": "klgrad", "completions": WHOLE_BATCH}
    return [row | {name: row.get(name) or value for name, value in defaults.items()} for row in rows]


def setting_of(row: runs.Row) -> str:
    """Learning rate and schedule."""
    return f"{row['learning_rate']:g} {row['schedule']}"


def completions_of(row: runs.Row) -> int:
    """How many completions were sampled up to this evaluation."""
    return row["update"] // int(row["uses"]) * int(row["completions"])


def best_settings(rows: Iterable[runs.Row]) -> dict[str, str]:
    """The setting with which each arm ends nearest, by its runs of the first seed that have ended."""
    ended = (row for row in rows if completions_of(row) == ALL)
    return {arm: setting_of(row) for arm, row in runs.nearest(ended, ARM).items()}


def _at(arms: dict[str, list[runs.Row]], completions: int) -> Numbers:
    """All columns of every arm after so many completions, with the seconds of training, and the runs themselves."""
    by_arm = {}
    for arm, group in arms.items():
        if here := [row for row in group if completions_of(row) == completions]:
            timed = [row for row in here if row.get("seconds") is not None]
            by_arm[arm] = {column: runs.over_seeds(here, column) for column in COLUMNS}
            by_arm[arm] |= {"seconds": runs.over_seeds(timed, "seconds"), "rows": here}
    return by_arm


def _path(rows: list[runs.Row]) -> Numbers:
    """Both KLs of an arm over the completions, with its updates."""
    path: Numbers = {name: [] for name in ("completions", "updates", runs.OWN, runs.TEACHERS)}
    for update in sorted({row["update"] for row in rows}):
        here = runs.at_update(rows, update)
        path["completions"].append(completions_of(here[0]))
        path["updates"].append(update)
        for column in (runs.OWN, runs.TEACHERS):
            path[column].append(runs.over_seeds(here, column))
    return path


def best_of_trl(end: Numbers, column: str) -> str:
    """The arm of TRL's trainer with the lowest mean KL, or with the most right answers; empty without runs of it."""
    sign = -1 if column == runs.RIGHT else 1
    trl = (arm for arm in end if arm.startswith("trl"))
    return min(trl, key=lambda arm: sign * end[arm][column]["mean"], default="")


def check(numbers: Numbers) -> list[Check]:
    """Sentences by completions, by both KLs; then by right answers, by half of the completions, and by seconds."""
    end = numbers["end"]
    checks = [each for measure, words in MEASURES.items() for each in _by_one_kl(end, measure, words)]
    for words, arm in (("1", ONCE), ("TRL's trainer", best_of_trl(end, runs.RIGHT))):
        more = runs.difference(_rows_at(end, FOUR), _rows_at(end, arm), runs.RIGHT)
        checks.append(runs.exceeds_over_seeds(f"4 uses answer more right than {words}", more))
    others = {"1 use": ONCE, "TRL's trainer": best_of_trl(end, runs.OWN)}
    for (words, arm), uses in product(others.items(), ("4", "8")):
        claim = f"{uses} uses of half of the completions are nearer than {words} with all, {MEASURES[runs.OWN]}"
        half = _rows_at(numbers["half"], REUSED[uses])
        checks.append(runs.exceeds_over_seeds(claim, runs.difference(_rows_at(end, arm), half, runs.OWN)))
    # Of our own trainer alone: TRL's is run without what makes ours sample faster.
    four, once = ([row for row in _rows_at(end, arm) if row.get("seconds") is not None] for arm in (FOUR, ONCE))
    longer = runs.excess(four, once, "seconds")
    return [*checks, runs.below_over_seeds("4 uses take less than twice the seconds of 1", longer, TWICE_AS_LONG)]


def _by_one_kl(end: Numbers, measure: str, words: str) -> Iterator[Check]:
    trl = best_of_trl(end, measure)
    sides = NEARER | {f"{uses} uses end nearer than TRL's trainer": (trl, arm) for uses, arm in REUSED.items()}
    for claim, (farther, nearer) in sides.items():
        less = runs.difference(_rows_at(end, farther), _rows_at(end, nearer), measure)
        yield runs.exceeds_over_seeds(f"{claim}, {words}", less)
    claim = f"1 use ends as near as TRL's reverse KL, within a tenth, {words}"
    same = _rows_at(end, named("trl-reverse", 1, WHOLE_BATCH))
    yield runs.equal_over_seeds(claim, runs.excess(_rows_at(end, ONCE), same, measure), CLOSE)


def _rows_at(by_arm: Numbers, arm: str) -> list[runs.Row]:
    """The runs of an arm; none for an arm without runs."""
    return by_arm[arm]["rows"] if arm in by_arm else []
