"""The generated parts of docs/experiments: tables of the experiments on language models, from their studies."""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache

from reference.text import table

from klgrad.papers import Settings
from klgrad.papers.asyncopd.stale_distillation import COMPARED
from klgrad.papers.comedy.asynchronous import ARMS, CONTROL, LAST as EARLY, LONG_LAST as LATE
from klgrad.papers.comedy.on_policy import NOT_A_KL
from klgrad.papers.own.baselines import SHOWN as SAMPLINGS
from klgrad.papers.own.discount import BATCH, BIAS, COSINE, ONE_RATE, STUDENTS, VARIANCE, squared_error
from klgrad.papers.own.reuse import PER_COMPLETION
from klgrad.papers.runs import COLUMNS as DISTILLED, ENOUGH_SEEDS, OWN, RIGHT, TEACHERS, differs
from klgrad.papers.study import Check, Numbers, load_study, studies, survivors
from klgrad.papers.tang_munos.fig8_language_model import COLUMNS as FIG8_COLUMNS, LAST as FIG8_LAST
from klgrad.papers.tang_munos.long_runs import LAST as LONG_LAST, WORDS as LONG_ARMS

AGES = ("fresh", "fresh-24", "lag-4", "lag-16", "filled-16", "reuse-4", "reuse-16")
"""Completions that are that many updates old, or that are used for so many updates."""
REUSED = ("trainer", "uses x completions of a batch")
"""The columns that an arm of the experiment on reused completions has in its name."""
KLS = ("KL(student‖teacher) per token", "KL(teacher‖student) per token")
STUDENT_HEAD = (*KLS, "right answers", "entropy per token", "tokens")
"""The measures of a distilled student."""
TRAINED_HEAD = ("KL(π‖ref) per completion", "right answers", "out of domain", "entropy per token", "tokens")
"""The measures of a policy that is trained by rewards."""


@cache
def _numbers(name: str) -> Numbers:
    return load_study(name).computation.run(Settings())


def lean_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns that say the same in every row, which are named below it."""
    columns = list(zip(head, *rows, strict=True))
    same = [column for column in columns if len(set(column[1:])) == 1]
    head, *rows = zip(*(column for column in columns if column not in same), strict=True)
    words = "; ".join(f"{name} {value}" for name, value, *_ in same)
    return table(head, rows) + (f"\nIn every row: {words}.\n" if same else "")


def fig8() -> str:
    """Every arm of the distillation experiment after its last update, with means over seeds."""
    numbers, rows = _numbers("tang-munos/fig8"), []
    last = numbers["updates"].index(FIG8_LAST)
    for name in sorted(numbers["arms"], key=_may_end_first):
        lengths, arm = name.split()
        cells = [_with_error(numbers["arms"][name][column][last]) for column in FIG8_COLUMNS]
        rows.append((lengths, f"`{arm}`", numbers["rates"][name], str(len(numbers["runs"][name])), *cells))
    own = ("KL(student‖teacher) per completion", "per token", "tokens")
    measures = (*own, "KL(teacher‖student) per token", "entropy per token", "right answers")
    return lean_table(("completions", "arm", "rate", "seeds", *measures), rows)


def _may_end_first(name: str) -> tuple[bool, str]:
    return not name.startswith("may-end"), name


def fig8_runs() -> str:
    """The end of every run of the distillation experiment that is judged: KL per completion, with its tokens."""
    runs, rows = _numbers("tang-munos/fig8")["runs"], []
    for name in sorted(runs, key=_may_end_first):
        lengths, arm = name.split()
        ends = ", ".join(f"{run['kl_per_sequence'][-1]:.1f} ({run['length'][-1]:.0f})" for run in runs[name])
        rows.append((lengths, f"`{arm}`", ends))
    return table(("completions", "arm", "KL(student‖teacher) per completion of each run (tokens)"), rows)


def stale_distillation() -> str:
    """Every arm and age of the completions of the experiment on stale distillation, after its last update."""
    end, rows = _numbers("asyncopd/stale-distillation")["end"], []
    for name in sorted(end, key=lambda name: (name.split()[0], AGES.index(name.split()[1]))):
        arm, stale = name.split()
        rows.append((f"`{arm}`", stale, *_distilled(end[name])))
    return lean_table(("arm", "completions", "seeds", *STUDENT_HEAD), rows)


def stale_costs() -> str:
    """What each comparison costs each arm of that experiment, seed by seed; bold if it counts."""
    rows = []
    measures = {OWN: "KL(student‖teacher)", TEACHERS: "KL(teacher‖student)", RIGHT: "right answers"}
    for column, found in _numbers("asyncopd/stale-distillation")["costs"].items():
        for arm in dict.fromkeys(setting.split()[0] for setting in found):
            rows.append((measures[column], f"`{arm}`", *(_signed(found[f"{arm} {name}"]) for name in COMPARED)))
    return table(("measure", "arm", *COMPARED), rows)


def discount() -> str:
    """Every arm and size of the batch of the experiment on the discount at its best rate, after its last update."""
    numbers = _numbers("klgrad/discount")
    best = {f"{run['completions']} {run['arm']}": run["learning_rate"] for run in numbers["rates"] if run["best"]}
    return _discounted(numbers["end"], best)


def discount_one_rate() -> str:
    """The arms of that experiment which have runs at one rate for all, after their last update."""
    ends = _numbers("klgrad/discount")["one_rate"]
    return _discounted(ends, dict.fromkeys(ends, ONE_RATE))


def _discounted(ends: Numbers, rates: Mapping[str, str | float]) -> str:
    """A row for each size of the batch and arm, with its rate."""
    rows = []
    for name in sorted(ends, key=lambda name: (-int(name.split()[0]), name)):
        size, arm = name.split()
        rows.append((size, f"`{arm}`", f"{float(rates[name]):g}", *_distilled(ends[name])))
    return lean_table(("completions", "arm", "rate", "seeds", *STUDENT_HEAD), rows)


def discount_comparisons() -> str:
    """The differences by which that experiment is judged, at both sizes; bold if they count."""
    rows = [
        (claim, *(_difference(found) if found["seeds"] else "no runs" for found in at.values()))
        for claim, at in _numbers("klgrad/discount")["comparisons"].items()
    ]
    return table(("difference", "256 completions", "64 completions"), rows)


def discount_rates() -> str:
    """The best of three rates of each arm and size of the batch, with the KLs at all three; one seed."""
    runs, rows = _numbers("klgrad/discount")["rates"], []
    rates = sorted({run["learning_rate"] for run in runs}, key=float)
    for best in sorted((run for run in runs if run["best"]), key=lambda run: (-int(run["completions"]), run["arm"])):
        same = {run["learning_rate"]: run for run in runs if all(run[n] == best[n] for n in ("completions", "arm"))}
        cells = [best["completions"], f"`{best['arm']}`", f"{best[OWN]:.3f} ± {best[f'{OWN}_se']:.2g}"]
        cells += [f"{best[name]:.3g}" for name in (RIGHT, "entropy_per_token")]
        for rate in rates:
            kls = f"{same[rate][OWN]:.3f}, {same[rate][TEACHERS]:.3g}" if rate in same else "no run"
            cells.append(f"**{kls}**" if rate == best["learning_rate"] else kls)
        rows.append(cells)
    measures = (KLS[0], "right answers", "entropy per token")
    return lean_table(("completions", "arm", *measures, *(f"both KLs at {rate}" for rate in rates)), rows)


def gradients() -> str:
    """Bias and variance of the gradient of one batch, for each arm of that experiment at both students."""
    found, rows = _numbers("klgrad/discount")["gradients"], []
    for update, arms in found.items():
        for arm, found in sorted(arms.items()):
            bias, variance, cosine = (_with_error(found[name]) for name in (BIAS, VARIANCE, COSINE))
            known = None not in (found[BIAS]["mean"], found[VARIANCE]["mean"])
            both = f"{squared_error(found, BATCH):.3g}" if known else "no value"
            rows.append((STUDENTS[update], f"`{arm}`", bias, variance, both, cosine, str(found["batches"])))
    measures = ("squared bias", "variance", "their sum", "cosine of the mean gradient", "batches")
    return table(("student", "arm", *measures), rows)


def _distilled(found: Numbers) -> list[str]:
    """The cells of one distilled student: seeds, and its measures."""
    return [str(found[OWN]["seeds"]), *(_with_error(found[column]) for column in DISTILLED)]


def kl_in_reward() -> str:
    """Every setting of the experiment on the division by the standard deviation, after its last update."""
    end, rows = _numbers("frpo/kl-in-reward")["end"], []
    shown = ("effective", "kl_per_sequence", "correct_in", "correct_out", "train_groups_without_spread")
    key = lambda name: (name.split()[1] == "divided", name.split()[0] == "none", name)
    for name in sorted(end, key=key):
        arm, division, coef = name.split()
        rows.append((division, *_setting(arm, coef, end[name], shown)))
    measures = ("effective coefficient", "KL(π‖ref) per completion", "right answers", "out of domain")
    head = ("advantages", "arm", "β", "seeds", *measures, "groups without spread", "skipped updates")
    return lean_table(head, rows)


def comparisons() -> str:
    """Every comparison of that experiment at every coefficient; bold if it counts by the rule of the experiments."""
    found = _numbers("frpo/kl-in-reward")["comparisons"]
    coefficients = list(next(iter(found.values())))
    rows = [(claim, *(_difference(at[coef]) for coef in coefficients)) for claim, at in found.items()]
    return table(("difference", *(f"β = {coef}" for coef in coefficients)), rows)


def _difference(found: dict[str, float]) -> str:
    errors = found["mean"] / found["error"] if found["error"] else float("nan")
    text = f"{found['mean']:.3f} ± {found['error']:.2g} ({errors:.1f}; {found['seeds']} seeds)"
    return _bold_if_counts(text, found)


def _bold_if_counts(text: str, found: dict[str, float]) -> str:
    """Bold if the difference counts, of either sign."""
    return f"**{text}**" if differs(found) else text


def _signed(found: dict[str, float]) -> str:
    """A difference of either sign, bold if it counts; empty without runs to compare with."""
    if not found["seeds"]:
        return ""
    text = f"{found['mean']:+.3f} ± {found['error']:.2g}"
    return _bold_if_counts(text, found)


def curve(study: str, runs: int) -> str:
    """How far each arm is from the curve of all others, at equal KL.

    Args:
        study: the experiment.
        runs: the number of runs that the curve is fitted to.
    """
    found, rows = _numbers(study)["curve"], []
    for name, off in sorted(found["off"].items()):
        arm, _, division = name.partition(" ")
        shown = f"`{arm}`, {division}" if division else f"`{arm}`"
        rows.append((shown, f"{off['mean']:+.3f} ± {off['error']:.2g}", f"{off['mean'] / off['error']:+.1f}"))
    words = (
        f"The curve explains {found['explained']:.1%} of the variance of right answers over {runs} runs. The runs "
        f"are spread around it by {found['spread']:.3f}; {found['evaluation error']:.3f} is the standard error of one "
        "evaluation, from its number of questions.\n"
    )
    return "\n".join((table(("arm", "distance from the curve of the others", "standard errors"), rows), words))


def baselines() -> str:
    """What the untrained model answers, by questions and temperature."""
    numbers, rows = _numbers("baselines"), []
    for name, found in numbers["end"].items():
        questions, _, temperature = name.rpartition(" ")
        cells = (_with_error(found[column]) for column in ("correct", "kl_per_sequence", "length"))
        rows.append((questions, str(numbers["questions"][questions]), SAMPLINGS[temperature], *cells))
    measures = ("right answers", "KL per completion from temperature 1", "tokens")
    return table(("questions", "number", "sampling", *measures), rows)


def frontier() -> str:
    """The KL at which each arm reaches a share of right answers."""
    arms = _numbers("tang-munos/fig7")["arms"]
    return table(("arm", "KL at 25% right answers"), [(f"`{arm}`", _with_error(found)) for arm, found in arms.items()])


def division_curve() -> str:
    """The curve of the experiment on the division."""
    return curve("frpo/kl-in-reward", len(_numbers("frpo/kl-in-reward")["runs"]))


def on_policy_curve() -> str:
    """The curve of the experiment on the estimators' places, without the arms that hold no KL."""
    runs = _numbers("comedy/on-policy")["runs"]
    return curve("comedy/on-policy", sum(run["name"] not in NOT_A_KL for run in runs))


def on_policy() -> str:
    """Every arm and coefficient of the experiment on the estimators' places, after its last update."""
    end, rows = _numbers("comedy/on-policy")["end"], []
    shown = ("kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
    for name in sorted(end, key=lambda name: (name.split()[0], float(name.split()[1]))):
        arm, coef = name.split()
        rows.append(_setting(arm, coef, end[name], shown))
    return lean_table(("arm", "β", "seeds", *TRAINED_HEAD, "skipped updates"), rows)


def asynchronous() -> str:
    """Every arm and lag of the experiment with stale completions, after its last update."""
    numbers, rows = _numbers("comedy/asynchronous"), []
    columns = ("kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
    for name in sorted(numbers["failures"], key=lambda name: (int(name.split()[1]), ARMS.index(name.split()[0]))):
        (arm, lag), failed, found = name.split(), numbers["failures"][name], numbers["end"].get(name)
        ended, skipped = failed["runs"] - failed["stopped"], f"{found['skipped_updates']['mean']:.2g}" if found else ""
        kl, right, *others = (_with_error(found[column]) if found else "" for column in columns)
        lost = _signed(numbers["cost"][name]) if name in numbers["cost"] else ""
        rows.append((lag, f"`{arm}`", str(ended), kl, right, lost, *others, *_fates(failed), skipped))
    kl, right, *others = TRAINED_HEAD
    head = ("lag", "arm", "seeds", kl, right, "lost by the lag", *others, "collapsed", "stopped", "skipped updates")
    return lean_table(head, rows)


def long_asynchronous() -> str:
    """The arms that also have runs of 180 updates on completions 10 updates old, early and at their end."""
    numbers = _numbers("comedy/asynchronous")
    rows = []
    for name, found in numbers["long_end"].items():
        path = numbers["paths"][name]
        at = path["updates"].index(EARLY)
        cells = [_with_error({"mean": path["mean"][at], "error": path["error"][at]})]
        cells += [_with_error(found[column]) for column in ("correct_in", "kl_per_sequence", "length")]
        rows.append((f"`{name.split()[0]}`", str(found["correct_in"]["seeds"]), *cells))
    late = (f"after {LATE}", f"KL(π‖ref) per completion after {LATE}", f"tokens after {LATE}")
    return table(("arm", "seeds", f"right answers after {EARLY} updates", *late), rows)


def k1_loss() -> str:
    """Every run of k1 as a loss on old completions: right answers after each third of its updates, and the last KL."""
    rows = []
    for run in _numbers("comedy/asynchronous")["k1-loss"]:
        last = run["update"][-1]
        right = ", ".join(
            f"{x:.3f}" for update, x in zip(run["update"], run["correct_in"], strict=True) if update % (last // 3) == 0
        )
        product = f"{int(run['lag']) * float(run['kl_coef']):.2g}"
        kl = f"{run['kl_per_sequence'][-1]:.3g}"
        rows.append((run["kl_coef"], run["lag"], product, str(last), run["seed"], right, kl))
    measures = ("right answers at the start and after each third", "last KL(π‖ref)")
    return table(("β", "lag", "lag x β", "updates", "seed", *measures), rows)


def weighted() -> str:
    """What importance weights on the KL change, at each lag; bold if it counts by the rule of the experiments."""
    shown = ("correct_in", "equal_kl", "correct_out", "kl_per_sequence", "entropy_per_token")
    numbers, rows = _numbers("comedy/asynchronous"), []
    for lag, arms in numbers["weighted"].items():
        for arm, found in arms.items():
            cells = ((_at_equal_kl if column == "equal_kl" else _signed)(found[column]) for column in shown)
            rows.append((lag, f"`{arm}`", f"`{CONTROL}`", *cells))
    measures = ("right answers", "right answers at equal KL", "out of domain", "KL per completion", "entropy per token")
    return table(("lag", "arm", "less", *measures), rows)


def _at_equal_kl(found: dict[str, float]) -> str:
    """A difference with its number of seeds if they are too few: runs whose KL falls have no part in it."""
    if not found["seeds"]:
        return "no value"
    few = f" ({found['seeds']} seed{'s' * (found['seeds'] != 1)})" if found["seeds"] < ENOUGH_SEEDS else ""
    return _signed(found) + few


def rethinking() -> str:
    """Every arm and learning rate of GRPO with a KL as a loss, after its last update."""
    numbers, rows = _numbers("rethinking/language-model"), []
    shown = ("kl_per_token", "kl_per_sequence", "train_reward", "noise", "correct_in", "correct_out")
    shown += ("entropy_per_token", "length")
    for name in sorted(numbers["stopped"], key=lambda name: (float(name.split()[1]), name)):
        (arm, rate), stopped, found = name.split(), numbers["stopped"][name], numbers["end"].get(name)
        ended, skipped = (found["noise"]["seeds"], f"{found['skipped_updates']['mean']:.2g}") if found else (0, "")
        cells = (_with_error(found[column]) if found else "" for column in shown)
        rows.append((rate, f"`{arm}`", str(ended), *cells, str(stopped), skipped))
    measures = ("KL(π‖ref) per token", "per completion", "training reward", "its noise", *TRAINED_HEAD[1:])
    return lean_table(("rate", "arm", "seeds", *measures, "stopped", "skipped updates"), rows)


def long_runs() -> str:
    """Every arm of the long runs early and at the end, with the growth of its KL between the last two evaluations."""
    numbers, rows = _numbers("tang-munos/long-runs"), []
    columns = ("kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
    for arm, update in ((arm, update) for arm in LONG_ARMS if arm in numbers["failures"] for update in numbers["at"]):
        if (found := numbers["at"][update].get(arm)) is None:
            continue
        kl, *others = (_with_error(found[column]) for column in columns)
        growth = _signed(numbers["growth"][arm]) if update == str(LONG_LAST) else ""
        seeds, skipped = str(found["correct_in"]["seeds"]), f"{found['skipped_updates']['mean']:.2g}"
        rows.append((f"`{arm}`", update, seeds, kl, growth, *others, *_fates(numbers["failures"][arm]), skipped))
    kl, *others = TRAINED_HEAD
    head = ("arm", "updates", "seeds", kl, "its growth from 270 to 300", *others)
    return lean_table((*head, "collapsed", "stopped", "skipped updates"), rows)


def _fates(failed: dict[str, int]) -> list[str]:
    """How many runs of a setting had collapsed at their end, and how many had to be stopped."""
    return [str(failed[kind]) for kind in ("collapsed", "stopped")]


def long_pairs() -> str:
    """The difference of any two arms of the long runs, early, at the end and at equal KL; bold if it counts."""
    numbers, rows = _numbers("tang-munos/long-runs"), []
    for pair, columns in numbers["pairs"].items():
        one, other = pair.split()
        cells = (_signed(found) for at in columns.values() for found in at.values())
        rows.append(
            (
                f"`{one}` less `{other}`",
                *cells,
                _signed(numbers["equal_kl"][pair]) if pair in numbers["equal_kl"] else "",
            )
        )
    measures = ("right answers at 60", "at 300", "KL at 60", "at 300", "right answers at equal KL")
    return table(("difference", *measures), rows)


def reuse() -> str:
    """Every arm of the experiment on reused completions at its best setting, after its last update."""
    numbers, rows = _numbers("klgrad/reuse"), []
    for arm in sorted(numbers["end"], key=_by_trainer):
        found = numbers["end"][arm]
        seconds = _with_error(found["seconds"]) if found["seconds"]["seeds"] else ""
        cells = (*_distilled(found), _with_error(found[PER_COMPLETION]))
        rows.append((*_reused(arm), numbers["settings"][arm], seconds, *cells))
    head = (*REUSED, "rate", "seconds", "seeds", *STUDENT_HEAD, "KL(student‖teacher) per completion")
    return lean_table(head, rows)


def reuse_sweep() -> str:
    """The last KL on the student's completions of every setting with the first seed; the best of an arm in bold."""
    numbers, rows = _numbers("klgrad/reuse"), []
    columns = sorted({setting for found in numbers["sweep"].values() for setting in found}, key=_by_rate)
    for arm in sorted(numbers["sweep"], key=_by_trainer):
        shown = {setting: f"{kl:.3f}" for setting, kl in numbers["sweep"][arm].items()}
        best = numbers["settings"][arm]
        cells = (f"**{shown[best]}**" if setting == best else shown.get(setting, "no run") for setting in columns)
        rows.append((*_reused(arm), *cells))
    return table((*REUSED, *columns), rows)


def _reused(arm: str) -> tuple[str, str]:
    """The cells of an arm under `REUSED`."""
    trainer, uses, size = arm.split()
    return f"`{trainer}`", f"{uses} x {size}"


def _by_trainer(arm: str) -> tuple[bool, int, int, str]:
    """Our trainer before TRL's, then the larger batch, then fewer uses."""
    trainer, uses, size = arm.split()
    return trainer != "klgrad", -int(size), int(uses), trainer


def _by_rate(setting: str) -> tuple[str, float]:
    rate, schedule = setting.split()
    return schedule, float(rate)


@cache
def judged(name: str) -> list[Check]:
    """The sentences of a study."""
    return load_study(name).computation.check(_numbers(name))


@cache
def _of_all_experiments() -> tuple[list[Check], list[Check]]:
    """The sentences of all experiments, and those that survive the correction for their number."""
    found = [check for name, study in studies().items() if study.experiment for check in judged(name)]
    return found, survivors(found)


def surviving() -> str:
    """How many sentences survive the correction for the number of all."""
    found, kept = _of_all_experiments()
    known = [check for check in found if check.chance is not None]
    decided = sum(check.decided for check in known)
    return f"Of {len(known)} sentences with an error, {decided} are decided, and {len(kept)} of these survive.\n"


def checks_of(name: str) -> str:
    """The sentences of a study's claim with their measured differences, and how many wait for runs."""
    return checks_table(judged(name), _of_all_experiments()[1])


def checks_table(checks: list[Check], kept: Container[Check] = ()) -> str:
    """A row for each sentence, and a line for those without runs or measurements.

    Args:
        checks: the sentences.
        kept: those that survive the correction for the number of sentences.
    """
    shown = [check for check in checks if not check.waits]
    survives = lambda check: "" if check.chance is None or not check.decided else "yes" if check in kept else "no"
    rows = [(check.sentence, check.measured, check.verdict, survives(check)) for check in shown]
    parts = [table(("claim", "measured", "verdict", "survives"), rows)] if shown else []
    if count := len(checks) - len(shown):
        words = "sentence waits" if count == 1 else "sentences wait"
        parts.append(f"{count} {'more ' * bool(shown)}{words} for runs.\n")
    return "\n".join(parts)


def _setting(arm: str, coef: str, found: Numbers, shown: tuple[str, ...]) -> list[str]:
    """The row of an arm at one coefficient."""
    seeds, skipped = found["correct_in"]["seeds"], f"{found['skipped_updates']['mean']:.2g}"
    return [f"`{arm}`", f"{float(coef):g}", str(seeds), *(_with_error(found[column]) for column in shown), skipped]


def _with_error(found: dict[str, float]) -> str:
    """A mean and its error; one seed without an error of its evaluation has none."""
    if None in found.values() or found.get("seeds") == 0:
        return "no value"
    known = found["error"] or found.get("seeds") != 1
    return f"{found['mean']:.3g}" + (f" ± {found['error']:.2g}" if known else "")
