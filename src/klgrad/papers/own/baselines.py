"""Sharper sampling alone, without any training, answers more right; training answers still more, in domain.

The experiments sample at temperature 1. SmolLM2-135M-Instruct, untrained, is their reference, and the teacher of the
distillations. It answers the questions of the experiments at temperatures 1 and 0.5 and greedily: those held out, those
of other kinds, such as are drawn for training, and those of the distillations. Trained policies and distilled students
are those of other studies, at temperature 1. All models come from one file with 4-bit weights.
"""

from ...drawing import BLACK, BLUE, GREY, VERMILION
from .. import runs
from ..study import Check, Experiment, Figure, Numbers, Settings, columns, error_bars

TRAINED = Experiment("comedy.csv", "exp_comedy.py")
DISTILLED = Experiment("stale_distill.csv", "exp_stale_distill.py")
EXPERIMENT = Experiment("baselines.csv", "exp_baselines.py", on_cpu=True)
INSIDE, OUTSIDE, AS_TRAINED, TEACHER = "in domain", "out of domain", "drawn as in training", "distillation"
SAMPLED, SHARPER, GREEDY = "1.0", "0.5", "0.0"
RIGHT, KL = "correct", "kl_per_sequence"
COLUMNS = (RIGHT, KL, "length")
SETTING = "{set} {temperature}"
LAST, LAST_DISTILLED = 60, 40
NONE, STUDENT, GREEDY_OUTSIDE = "no KL after 60 updates", "student", f"{OUTSIDE} {GREEDY}"
CLAIMS = {
    "greedy decoding answers more right than sampling, in domain": (f"{INSIDE} {GREEDY}", f"{INSIDE} {SAMPLED}"),
    "greedy decoding answers more right than sampling, out of domain": (GREEDY_OUTSIDE, f"{OUTSIDE} {SAMPLED}"),
    "60 updates without a KL answer more right than greedy decoding, in domain": (NONE + INSIDE, f"{INSIDE} {GREEDY}"),
    "60 updates without a KL answer more right than greedy decoding, out of domain": (NONE + OUTSIDE, GREEDY_OUTSIDE),
    "sampled questions are easier when drawn as in training": (f"{AS_TRAINED} {SAMPLED}", f"{INSIDE} {SAMPLED}"),
    "with greedy decoding they are too": (f"{AS_TRAINED} {GREEDY}", f"{INSIDE} {GREEDY}"),
    "the teacher answers more right than a distilled student, both sampled": (f"{TEACHER} {SAMPLED}", STUDENT),
}
"""What should answer more right, and less."""


def run(settings: Settings) -> Numbers:
    rows = runs.rows_of(EXPERIMENT, settings)
    trained = runs.at_update(runs.rows_of(TRAINED, Settings()), LAST)
    distilled = runs.at_update(runs.finite_rows(DISTILLED, Settings()), LAST_DISTILLED)
    groups = runs.by_setting(rows, SETTING)
    groups |= {NONE + INSIDE: _untouched(trained, "correct_in"), NONE + OUTSIDE: _untouched(trained, "correct_out")}
    groups[STUDENT] = [row for row in distilled if (row["arm"], row["stale"]) == ("reverse-exact", "fresh")]
    return {
        "made": runs.provenance(rows),
        "questions": {
            name: sum(int(row["questions"]) for row in own if row["temperature"] == SAMPLED)
            for name, own in runs.grouped(rows, "{set}").items()
        },
        "end": runs.summaries(rows, COLUMNS, SETTING),
        "claims": runs.differences({claim: (RIGHT, *sides) for claim, sides in CLAIMS.items()}, groups, {}),
        "trained": [[row[KL], row["correct_in"]] for row in trained],
    }


def _untouched(trained: list[runs.Row], column: str) -> list[runs.Row]:
    """The runs without a KL, with right answers under the name that the untrained model's have."""
    return [{**row, RIGHT: row[column], f"{RIGHT}_se": row[f"{column}_se"]} for row in trained if row["arm"] == "none"]


def check(numbers: Numbers) -> list[Check]:
    return [runs.exceeds_over_seeds(claim, difference) for claim, difference in numbers["claims"].items()]


LABELS = {INSIDE: BLACK, AS_TRAINED: BLUE, OUTSIDE: VERMILION, TEACHER: GREY}
SHOWN = {SAMPLED: "T = 1", SHARPER: "T = 0.5", GREEDY: "greedy"}


def draw(numbers: Numbers, figure: Figure) -> None:
    figure.set_size_inches(11, 4.2)
    by_temperature, over_kl = figure.subplots(1, 2)
    look = {"ms": 5, "lw": 1.4, "capsize": 3}
    for name, colour in LABELS.items():
        if name in numbers["questions"]:
            right = [numbers["end"][f"{name} {t}"][RIGHT] for t in SHOWN]
            error_bars(by_temperature, range(len(SHOWN)), right, color=colour, label=name, **look)
    by_temperature.set_xticks(range(len(SHOWN)), SHOWN.values())
    by_temperature.set(ylabel="right answers", ylim=(0, None), title="untrained model, 3 seeds, ± 1 SE")
    by_temperature.legend(fontsize=8.5)
    points = zip(*numbers["trained"], strict=True)
    over_kl.plot(*points, "o", ms=4, color=GREY, mfc="none", lw=0, label="trained, T = 1")
    right, kl = ([numbers["end"][f"{INSIDE} {t}"][column] for t in SHOWN] for column in (RIGHT, KL))
    error_bars(over_kl, columns(kl, "mean")[0], right, color=BLACK, label="untrained, sharper", **look)
    for words, x, y in zip(SHOWN.values(), kl, right, strict=True):
        over_kl.annotate(words, (x["mean"], y["mean"]), (4, -12), textcoords="offset points", fontsize=8)
    over_kl.set(xlabel="KL(π‖ref) per completion, nats", ylabel="right answers, in domain")
    over_kl.set_title("each trained run of 60 updates;\nuntrained: 3 seeds, ± 1 SE")
    over_kl.legend(fontsize=8.5)
