"""In GRPO, k1 as a loss trains like no KL at all; k2 as a loss keeps the policy nearer to ref than k3 as a loss, and
trains more steadily.

Figures 2 to 5 of the paper, on a smaller model: SmolLM2-135M-Instruct learns sums and differences with GRPO's own
reductions (advantages divided by the group's standard deviation, a mean over the tokens of a completion), at two
learning rates. The paper's gap between the log-probs of policy and ref is the KL per token, here summed over the
vocabulary. Steadiness is the noise of the training reward: its standard deviation from update to update, without its
trend. Design, table and limits: docs/experiments.md.
"""

from ...drawing import STYLES
from .. import runs
from ..study import Check, Experiment, Figure, Numbers, Settings

LABELS = {
    "none": ("no KL", "black", "-"),
    "k1-loss": ("k1 as loss", *STYLES["k1-loss"][:2]),
    "k2-loss": ("k2 as loss", *STYLES["k2-loss"][:2]),
    "k3-loss": ("k3 as loss", *STYLES["k3-loss"][:2]),
}
PANELS = {
    "train_reward": "training reward",
    "train_reward_noise": "noise of the training reward",
    "kl_per_token": "KL(π‖ref) per token, nats",
    "entropy_per_token": "entropy per token, nats",
    "length": "tokens of a completion",
}
"""Columns, and what they are."""


def draw(numbers: Numbers, figure: Figure) -> None:
    """A row for each learning rate, a panel for each column; bands are of one standard error."""
    rates = sorted({name.split()[1] for paths in numbers["paths"].values() for name in paths}, key=float)
    figure.set_size_inches(3.2 * len(PANELS), 3.1 * len(rates) + 0.5)
    axes = figure.subplots(len(rates), len(PANELS), squeeze=False, sharex=True, sharey="col")
    for row, rate in zip(axes, rates, strict=True):
        row[0].set_ylabel(f"learning rate {rate}")
        for axis, column in zip(row, PANELS, strict=True):
            for arm, (label, colour, line) in LABELS.items():
                path = numbers["paths"][column].get(f"{arm} {rate}")
                runs.curve(axis, path, colour, line, alpha=0.15, label=label)
    for axis, title in zip(axes[0], PANELS.values(), strict=True):
        axis.set_title(f"{title}\n3 seeds, ± 1 SE", fontsize=10)
    for axis in axes[-1]:
        axis.set(xlabel="updates", xticks=[0, 20, 40, 60])
    labels = axes[0][0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(LABELS), fontsize=9)


EXPERIMENT = Experiment("rethinking.csv", "exp_rethinking.py")
LAST, EVERY = 60, 20
"""Updates of a run, and between its evaluations."""
RATES = ("1e-05", "3e-05")
HELD_OUT = ("kl_per_token", "kl_per_sequence", "correct_in", "correct_out", "entropy_per_token", "length")
COLUMNS = (*HELD_OUT, "train_reward", "noise", "skipped_updates")
SETTING = "{arm} {learning_rate:g}"
NONE, K1, K2, K3 = "none", "k1-loss", "k2-loss", "k3-loss"
GAP = "kl_per_token"
"""The paper's gap of log-probs."""
SAME_REWARD = 0.05
"""Two training rewards are the same if they differ by less than this."""
SAME_KL = 0.5
"""A KL is that of no KL if it differs by less than this share of what k2 as a loss changes: it is nearer to no KL. The
error of that change is not counted."""
SAME = {
    "k1 as loss ends with the training reward of no KL": ("train_reward", K1, NONE),
    "k1 as loss changes the KL by less than half of what k2 as loss does": (GAP, K1, NONE),
}
HIGHER = {
    "k2 as loss ends nearer to ref than no KL": (GAP, NONE, K2),
    "k3 as loss ends nearer to ref than no KL": (GAP, NONE, K3),
    "k2 as loss ends nearer to ref than k3 as loss": (GAP, K3, K2),
    "k3 as loss has a noisier reward than k2 as loss": ("noise", K3, K2),
    "k2 as loss keeps a higher entropy than k3 as loss": ("entropy_per_token", K2, K3),
}
"""What should be higher, and than what: a column and two arms."""


def run(settings: Settings) -> Numbers:
    # The training reward is a mean over the updates since the last evaluation.
    error = lambda row: {"train_reward_se": (row["train_reward_noise"] or 0.0) / EVERY**0.5}
    rows = [row | error(row) for row in runs.rows_of(EXPERIMENT, settings)]
    last = [{**row, **_noise(rows, row)} for row in runs.at_update(rows, LAST)]
    at_rate = lambda rate: runs.grouped((row for row in last if f"{row['learning_rate']:g}" == rate), runs.ARM)
    measured = lambda column: [row for row in rows if row[column] is not None]  # nothing is trained before the first
    return {
        "made": runs.provenance(rows),
        "end": runs.summaries(last, COLUMNS, SETTING),
        "gaps": {rate: runs.differences(SAME | HIGHER, at_rate(rate), {}) for rate in RATES},
        "stopped": {name: each["stopped"] for name, each in runs.failures(rows, LAST, SETTING).items()},
        "paths": {column: runs.paths(measured(column), column, SETTING) for column in PANELS},
    }


def _noise(rows: list[runs.Row], last: runs.Row) -> runs.Row:
    """The noise of a whole run, with its standard error.

    A standard deviation from n differences of neighbours has the relative error √(3/4n) if the noise is normal.
    """
    own = [row["train_reward_noise"] for row in rows if row["job"] == last["job"] and row["update"]]
    noise = (sum(x**2 for x in own) / len(own)) ** 0.5
    differences = len(own) * (EVERY - 1)
    return {"noise": noise, "noise_se": noise * (3 / (4 * differences)) ** 0.5}


def check(numbers: Numbers) -> list[Check]:
    """The paper's sentences at each learning rate; a sentence whose runs are missing is undecided."""
    return [check for rate in RATES for check in _at_rate(numbers["gaps"][rate], rate)]


def _at_rate(gaps: dict[str, runs.SeedMean], rate: str) -> list[Check]:
    # How far from no KL still counts as no KL; None if k2 as a loss has no effect to compare with.
    effect = gaps["k2 as loss ends nearer to ref than no KL"]
    margins = (SAME_REWARD, SAME_KL * effect["mean"] if runs.counts(effect) else None)
    checks = []
    for words, margin in zip(SAME, margins, strict=True):
        claim, gap = f"{words}, rate {rate}", gaps[words]
        if gap["seeds"] and margin is None:
            none = "no margin: k2 as loss is not nearer to ref either"
            checks.append(Check(claim, none, holds=False, decided=False))
        else:
            checks.append(runs.equal_over_seeds(claim, gap, margin or 0.0))
    return [*checks, *(runs.exceeds_over_seeds(f"{claim}, rate {rate}", gaps[claim]) for claim in HIGHER)]
