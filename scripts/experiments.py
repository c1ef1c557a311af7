"""The generated parts of docs/experiments: tables of the experiments on language models, from their studies."""

from collections.abc import Container, Mapping
from functools import cache

from klgrad.papers import Settings
from klgrad.papers.asyncopd.stale_distillation import COMPARED
from klgrad.papers.comedy.asynchronous import ARMS
from klgrad.papers.comedy.on_policy import NOT_A_KL
from klgrad.papers.own.baselines import SHOWN as SAMPLINGS
from klgrad.papers.own.discount import BATCH, BIAS, COSINE, ONE_RATE, STUDENTS, VARIANCE, squared_error
from klgrad.papers.own.reuse import PER_COMPLETION
from klgrad.papers.runs import COLUMNS as DISTILLED, ENOUGH_SEEDS, OWN, RIGHT, TEACHERS, counts
from klgrad.papers.study import Check, Numbers, load_study, studies, survivors
from klgrad.papers.tang_munos.fig8_language_model import COLUMNS as FIG8_COLUMNS, LAST as FIG8_LAST
from klgrad.papers.tang_munos.long_runs import LAST as LONG_LAST, WORDS as LONG_ARMS

AGES = ("fresh", "fresh-24", "lag-4", "lag-16", "filled-16", "reuse-4", "reuse-16")
"""Completions that are that many updates old, or that are used for so many updates."""
REUSED = "trainer | uses | completions of a batch"
"""The columns that an arm of the experiment on reused completions has in its name."""


@cache
def _numbers(name: str) -> Numbers:
    return load_study(name).computation.run(Settings())


def fig8() -> str:
    """Every arm of the distillation experiment after its last update, with means over seeds."""
    lines = [
        "| completions | arm | rate | seeds | KL(student‖teacher) per completion | per token | tokens | "
        "KL(teacher‖student) per token | entropy per token | right answers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    numbers = _numbers("tang-munos/fig8")
    last = numbers["updates"].index(FIG8_LAST)
    for name in sorted(numbers["arms"], key=lambda name: (not name.startswith("may-end"), name)):
        lengths, arm = name.split()
        cells = [_with_error(numbers["arms"][name][column][last]) for column in FIG8_COLUMNS]
        seeds = len(numbers["runs"][name])
        lines.append(f"| {lengths} | `{arm}` | {numbers['rates'][name]} | {seeds} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def fig8_runs() -> str:
    """The end of every run of the distillation experiment that is judged: KL per completion, with its tokens."""
    lines = ["| completions | arm | KL(student‖teacher) per completion of each run (tokens) |", "|---|---|---|"]
    runs = _numbers("tang-munos/fig8")["runs"]
    for name in sorted(runs, key=lambda name: (not name.startswith("may-end"), name)):
        lengths, arm = name.split()
        ends = ", ".join(f"{run['kl_per_sequence'][-1]:.1f} ({run['length'][-1]:.0f})" for run in runs[name])
        lines.append(f"| {lengths} | `{arm}` | {ends} |")
    return "\n".join([*lines, ""])


def stale_distillation() -> str:
    """Every arm and age of the completions of the experiment on stale distillation, after its last update."""
    lines = [
        "| arm | completions | seeds | KL(student‖teacher) per token | KL(teacher‖student) per token | right answers | "
        "entropy per token | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    end = _numbers("asyncopd/stale-distillation")["end"]
    for name in sorted(end, key=lambda name: (name.split()[0], AGES.index(name.split()[1]))):
        arm, stale = name.split()
        lines.append(f"| `{arm}` | {stale} | {_distilled(end[name])} |")
    return "\n".join([*lines, ""])


def stale_costs() -> str:
    """What each comparison costs each arm of that experiment, seed by seed; bold if it counts."""
    lines = [f"| measure | arm | {' | '.join(COMPARED)} |", "|---|---|" + "---|" * len(COMPARED)]
    measures = {OWN: "KL(student‖teacher)", TEACHERS: "KL(teacher‖student)", RIGHT: "right answers"}
    for column, found in _numbers("asyncopd/stale-distillation")["costs"].items():
        for arm in dict.fromkeys(setting.split()[0] for setting in found):
            cells = [_signed(found[f"{arm} {name}"]) for name in COMPARED]
            lines.append(f"| {measures[column]} | `{arm}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


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
    lines = [
        "| completions | arm | rate | seeds | KL(student‖teacher) per token | KL(teacher‖student) per token | "
        "right answers | entropy per token | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(ends, key=lambda name: (-int(name.split()[0]), name)):
        size, arm = name.split()
        lines.append(f"| {size} | `{arm}` | {float(rates[name]):g} | {_distilled(ends[name])} |")
    return "\n".join([*lines, ""])


def discount_comparisons() -> str:
    """The differences by which that experiment is judged, at both sizes; bold if they count."""
    lines = ["| difference | 256 completions | 64 completions |", "|---|---|---|"]
    for claim, at in _numbers("klgrad/discount")["comparisons"].items():
        cells = [_difference(found) if found else "no runs" for found in at.values()]
        lines.append(f"| {claim} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def discount_rates() -> str:
    """The best of three rates of each arm and size of the batch, with the KLs at all three; one seed."""
    runs = _numbers("klgrad/discount")["rates"]
    rates = sorted({run["learning_rate"] for run in runs}, key=float)
    lines = [
        "| completions | arm | best rate | KL(student‖teacher) per token | KL(teacher‖student) per token | "
        f"right answers | entropy per token | {' | '.join(f'both KLs at {rate}' for rate in rates)} |",
        "|---|---|---|---|---|---|---|" + "---|" * len(rates),
    ]
    for best in sorted((run for run in runs if run["best"]), key=lambda run: (-int(run["completions"]), run["arm"])):
        same = {run["learning_rate"]: run for run in runs if all(run[n] == best[n] for n in ("completions", "arm"))}
        cells = [f"{best[OWN]:.3f} ± {best[f'{OWN}_se']:.2g}"]
        cells += [f"{best[name]:.3g}" for name in (TEACHERS, RIGHT, "entropy_per_token")]
        cells += [f"{same[r][OWN]:.3f}, {same[r][TEACHERS]:.3g}" if r in same else "no run" for r in rates]
        lines.append(f"| {best['completions']} | `{best['arm']}` | {best['learning_rate']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def gradients() -> str:
    """Bias and variance of the gradient of one batch, for each arm of that experiment at both students."""
    lines = [
        "| student | arm | squared bias | variance | their sum | cosine of the mean gradient | batches |",
        "|---|---|---|---|---|---|---|",
    ]
    found = _numbers("klgrad/discount")["gradients"]
    if not found:
        return "Not measured yet.\n"
    for update, arms in found.items():
        for arm, found in sorted(arms.items()):
            shown = [_with_error(found[name]) for name in (BIAS, VARIANCE, COSINE)]
            known = None not in (found[BIAS]["mean"], found[VARIANCE]["mean"])
            shown.insert(2, f"{squared_error(found, BATCH):.3g}" if known else "no value")
            lines.append(f"| {STUDENTS[update]} | `{arm}` | {' | '.join(shown)} | {found['batches']} |")
    return "\n".join([*lines, ""])


def _distilled(found: Numbers) -> str:
    """The cells of one distilled student: seeds, and its measures."""
    return " | ".join([str(found[OWN]["seeds"]), *(_with_error(found[column]) for column in DISTILLED)])


def kl_in_reward() -> str:
    """Every setting of the experiment on the division by the standard deviation, after its last update."""
    lines = [
        "| advantages | arm | β | seeds | effective coefficient | KL(π‖ref) per completion | right answers | "
        "out of domain | groups without spread | skipped updates |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    end = _numbers("frpo/kl-in-reward")["end"]
    shown = ("effective", "kl_per_sequence", "correct_in", "correct_out", "train_groups_without_spread")
    key = lambda name: (name.split()[1] == "divided", name.split()[0] == "none", name)
    for name in sorted(end, key=key):
        arm, division, coef = name.split()
        lines.append(f"| {division} {_setting(arm, coef, end[name], shown)}")
    return "\n".join([*lines, ""])


def comparisons() -> str:
    """Every comparison of that experiment at every coefficient; bold if it counts by the rule of the experiments."""
    found = _numbers("frpo/kl-in-reward")["comparisons"]
    coefficients = list(next(iter(found.values())))
    head = " | ".join(f"β = {coef}" for coef in coefficients)
    lines = [f"| difference | {head} |", "|---|" + "---|" * len(coefficients)]
    for claim, at in found.items():
        lines.append(f"| {claim} | {' | '.join(_difference(at[coef]) for coef in coefficients)} |")
    return "\n".join([*lines, ""])


def _difference(found: dict[str, float]) -> str:
    errors = found["difference"] / found["error"] if found["error"] else float("nan")
    text = f"{found['difference']:.3f} ± {found['error']:.2g} ({errors:.1f}; {found['seeds']} seeds)"
    return _bold_if_counts(text, found)


def _bold_if_counts(text: str, found: dict[str, float]) -> str:
    """Bold if the difference counts, of either sign."""
    return f"**{text}**" if counts({**found, "difference": abs(found["difference"])}) else text


def _signed(found: dict[str, float] | None) -> str:
    """A difference of either sign, bold if it counts; empty without runs to compare with."""
    if found is None:
        return ""
    text = f"{found['difference']:+.3f} ± {found['error']:.2g}"
    return _bold_if_counts(text, found)


def curve(study: str, runs: int) -> str:
    """How far each arm is from the curve of all others, at equal KL.

    Args:
        study: the experiment.
        runs: the number of runs that the curve is fitted to.
    """
    found = _numbers(study)["curve"]
    lines = ["| arm | distance from the curve of the others | standard errors |", "|---|---|---|"]
    for name, off in sorted(found["off"].items()):
        arm, _, division = name.partition(" ")
        value = f"{off['mean']:+.3f} ± {off['error']:.2g}"
        shown = f"`{arm}`, {division}" if division else f"`{arm}`"
        lines.append(f"| {shown} | {value} | {off['mean'] / off['error']:+.1f} |")
    words = (
        f"The curve explains {found['explained']:.1%} of the variance of right answers over {runs} runs. The runs "
        f"are spread around it by {found['spread']:.3f}; {found['evaluation error']:.3f} is the standard error of one "
        "evaluation, from its number of questions."
    )
    return "\n".join([*lines, "", words, ""])


def baselines() -> str:
    """What the untrained model answers, by questions and temperature."""
    lines = [
        "| questions | number | sampling | right answers | KL per completion from temperature 1 | tokens |",
        "|---|---|---|---|---|---|",
    ]
    numbers = _numbers("baselines")
    for name, found in numbers["end"].items():
        questions, _, temperature = name.rpartition(" ")
        cells = " | ".join(_with_error(found[column]) for column in ("correct", "kl_per_sequence", "length"))
        sampling = SAMPLINGS[temperature]
        lines.append(f"| {questions} | {numbers['questions'][questions]} | {sampling} | {cells} |")
    return "\n".join([*lines, ""])


def frontier() -> str:
    """The KL at which each arm reaches a share of right answers."""
    numbers = _numbers("tang-munos/fig7")
    lines = ["| arm | KL at 25% right answers |", "|---|---|"]
    for arm, found in numbers["arms"].items():
        lines.append(f"| `{arm}` | {'no value' if found is None else _with_error(found)} |")
    return "\n".join([*lines, ""])


def division_curve() -> str:
    """The curve of the experiment on the division."""
    return curve("frpo/kl-in-reward", len(_numbers("frpo/kl-in-reward")["runs"]))


def on_policy_curve() -> str:
    """The curve of the experiment on the estimators' places, without the arms that hold no KL."""
    runs = _numbers("comedy/on-policy")["runs"]
    return curve("comedy/on-policy", sum(run["name"] not in NOT_A_KL for run in runs))


def on_policy() -> str:
    """Every arm and coefficient of the experiment on the estimators' places, after its last update."""
    lines = [
        "| arm | β | seeds | KL(π‖ref) per completion | right answers | out of domain | entropy per token | tokens | "
        "skipped updates |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    end = _numbers("comedy/on-policy")["end"]
    shown = ("kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
    for name in sorted(end, key=lambda name: (name.split()[0], float(name.split()[1]))):
        arm, coef = name.split()
        lines.append(_setting(arm, coef, end[name], shown))
    return "\n".join([*lines, ""])


def asynchronous() -> str:
    """Every arm and lag of the experiment with stale completions, after its last update."""
    lines = [
        "| lag | arm | seeds | KL(π‖ref) per completion | right answers | lost by the lag | out of domain | "
        "entropy per token | tokens | collapsed | stopped | skipped updates |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    numbers = _numbers("comedy/asynchronous")
    columns = ("kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
    for name in sorted(numbers["failures"], key=lambda name: (int(name.split()[1]), ARMS.index(name.split()[0]))):
        (arm, lag), failed, found = name.split(), numbers["failures"][name], numbers["end"].get(name)
        ended, skipped = failed["runs"] - failed["stopped"], f"{found['skipped_updates']['mean']:.2g}" if found else ""
        fates = [str(failed[kind]) for kind in ("collapsed", "stopped")]
        kl, right, *others = (_with_error(found[column]) if found else "" for column in columns)
        cells = [kl, right, _signed(numbers["cost"].get(name)), *others, *fates, skipped]
        lines.append(f"| {lag} | `{arm}` | {ended} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def k1_loss() -> str:
    """Every run of k1 as a loss on old completions: right answers after each 20 updates, and the last KL."""
    lines = [
        "| β | lag | lag x β | seed | right answers at 0, 20, 40 and 60 updates | last KL(π‖ref) per completion |",
        "|---|---|---|---|---|---|",
    ]
    for run in _numbers("comedy/asynchronous")["k1-loss"]:
        right = ", ".join(f"{x:.3f}" for x in run["correct_in"])
        product = f"{int(run['lag']) * float(run['kl_coef']):.2g}"
        kl = f"{run['kl_per_sequence'][-1]:.3g}"
        lines.append(f"| {run['kl_coef']} | {run['lag']} | {product} | {run['seed']} | {right} | {kl} |")
    return "\n".join([*lines, ""])


def weighted() -> str:
    """What importance weights on the KL change, at each lag; bold if it counts by the rule of the experiments."""
    lines = [
        "| lag | arm | less | right answers | right answers at equal KL | out of domain | KL per completion | "
        "entropy per token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shown = ("correct_in", "equal_kl", "correct_out", "kl_per_sequence", "entropy_per_token")
    numbers = _numbers("comedy/asynchronous")
    for lag, arms in numbers["weighted"].items():
        other = numbers["compared_with"][lag]
        for arm, found in arms.items():
            cells = " | ".join((_at_equal_kl if column == "equal_kl" else _signed)(found[column]) for column in shown)
            lines.append(f"| {lag} | `{arm}` | `{other}` | {cells} |")
    return "\n".join([*lines, ""])


def _at_equal_kl(found: dict[str, float] | None) -> str:
    """A difference with its number of seeds if they are too few: runs whose KL falls have no part in it."""
    if found is None:
        return "no value"
    few = f" ({found['seeds']} seed{'s' * (found['seeds'] != 1)})" if found["seeds"] < ENOUGH_SEEDS else ""
    return _signed(found) + few


def rethinking() -> str:
    """Every arm and learning rate of GRPO with a KL as a loss, after its last update."""
    lines = [
        "| rate | arm | seeds | KL(π‖ref) per token | per completion | training reward | its noise | right answers | "
        "out of domain | entropy per token | tokens | stopped | skipped updates |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    numbers = _numbers("rethinking/language-model")
    shown = ("kl_per_token", "kl_per_sequence", "train_reward", "noise", "correct_in", "correct_out")
    shown += ("entropy_per_token", "length")
    for name in sorted(numbers["stopped"], key=lambda name: (float(name.split()[1]), name)):
        (arm, rate), stopped, found = name.split(), numbers["stopped"][name], numbers["end"].get(name)
        ended, skipped = (found["noise"]["seeds"], f"{found['skipped_updates']['mean']:.2g}") if found else (0, "")
        cells = " | ".join(_with_error(found[column]) if found else "" for column in shown)
        lines.append(f"| {rate} | `{arm}` | {ended} | {cells} | {stopped} | {skipped} |")
    return "\n".join([*lines, ""])


def long_runs() -> str:
    """Every arm of the long runs early and at the end, with the growth of its KL between the last two evaluations."""
    lines = [
        "| arm | updates | seeds | KL(π‖ref) per completion | its growth from 270 to 300 | right answers | "
        "out of domain | entropy per token | tokens | collapsed | stopped | skipped updates |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    numbers = _numbers("tang-munos/long-runs")
    columns = ("kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
    for arm, update in ((arm, update) for arm in LONG_ARMS if arm in numbers["failures"] for update in numbers["at"]):
        if (found := numbers["at"][update].get(arm)) is None:
            continue
        kl, *others = (_with_error(found[column]) for column in columns)
        last, failed = update == str(LONG_LAST), numbers["failures"][arm]
        growth, fates = ("", ["", ""]) if not last else (_signed(numbers["growth"].get(arm)), _fates(failed))
        cells = [kl, growth, *others, *fates, f"{found['skipped_updates']['mean']:.2g}"]
        lines.append(f"| `{arm}` | {update} | {found['correct_in']['seeds']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _fates(failed: dict[str, int]) -> list[str]:
    return [str(failed[kind]) for kind in ("collapsed", "stopped")]


def long_pairs() -> str:
    """The difference of any two arms of the long runs, early, at the end and at equal KL; bold if it counts."""
    lines = [
        "| difference | right answers at 60 | at 300 | KL at 60 | at 300 | right answers at equal KL |",
        "|---|---|---|---|---|---|",
    ]
    numbers = _numbers("tang-munos/long-runs")
    for pair, columns in numbers["pairs"].items():
        one, other = pair.split()
        cells = [_signed(found) for at in columns.values() for found in at.values()]
        cells.append(_signed(numbers["equal_kl"].get(pair)))
        lines.append(f"| `{one}` less `{other}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def reuse() -> str:
    """Every arm of the experiment on reused completions at its best setting, after its last update."""
    lines = [
        f"| {REUSED} | rate | schedule | seconds | seeds | KL(student‖teacher) per token | "
        "KL(teacher‖student) per token | right answers | entropy per token | tokens | "
        "KL(student‖teacher) per completion |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    numbers = _numbers("klgrad/reuse")
    for arm in sorted(numbers["end"], key=_by_trainer):
        found, (rate, schedule) = numbers["end"][arm], numbers["settings"][arm].split()
        seconds = "" if found["seconds"] is None else _with_error(found["seconds"])
        cells = f"{seconds} | {_distilled(found)} | {_with_error(found[PER_COMPLETION])}"
        lines.append(f"| {_reused(arm)} | {rate} | {schedule} | {cells} |")
    return "\n".join([*lines, ""])


def reuse_sweep() -> str:
    """The last KL on the student's completions of every setting with the first seed; the best of an arm in bold."""
    numbers = _numbers("klgrad/reuse")
    columns = sorted({setting for found in numbers["sweep"].values() for setting in found}, key=_by_rate)
    lines = [f"| {REUSED} | {' | '.join(columns)} |", "|---|---|---|" + "---|" * len(columns)]
    for arm in sorted(numbers["sweep"], key=_by_trainer):
        shown = {setting: f"{kl:.3f}" for setting, kl in numbers["sweep"][arm].items()}
        best = numbers["settings"][arm]
        cells = [f"**{shown[best]}**" if setting == best else shown.get(setting, "no run") for setting in columns]
        lines.append(f"| {_reused(arm)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _reused(arm: str) -> str:
    """The cells of an arm under `REUSED`."""
    trainer, uses, size = arm.split()
    return f"`{trainer}` | {uses} | {size}"


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
    lines = ["| claim | measured | verdict | survives |", "|---|---|---|---|"] if shown else []
    for check in shown:
        survives = "" if check.chance is None or not check.decided else "yes" if check in kept else "no"
        lines.append(f"| {check.sentence} | {check.measured} | {check.verdict} | {survives} |")
    if count := len(checks) - len(shown):
        words = "sentence waits" if count == 1 else "sentences wait"
        lines += ["", f"{count} more {words} for runs."] if shown else [f"{count} {words} for runs."]
    return "\n".join([*lines, ""])


def _setting(arm: str, coef: str, found: Numbers, shown: tuple[str, ...]) -> str:
    """The row of an arm at one coefficient."""
    cells = " | ".join(_with_error(found[column]) for column in shown)
    seeds, skipped = found["correct_in"]["seeds"], found["skipped_updates"]["mean"]
    return f"| `{arm}` | {float(coef):g} | {seeds} | {cells} | {skipped:.2g} |"


def _with_error(found: dict[str, float]) -> str:
    """A mean and its error; one seed without an error of its evaluation has none."""
    if None in found.values():
        return "no value"
    known = found["error"] or found.get("seeds") != 1
    return f"{found['mean']:.3g}" + (f" ± {found['error']:.2g}" if known else "")
