"""Update the generated parts of the README and the docs: `python scripts/readme.py` writes them, `--check` compares.

A part is the text between `<!-- NAME -->` and `<!-- /NAME -->`. The pages of `reference` are generated as a whole,
and the notebooks are run.
"""

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import stdev
from textwrap import shorten

sys.path.append(str(Path(__file__).parent.parent / "docs" / "figures"))
import experiments
import footguns
import large_batches
import layout
import notebooks
import on_and_off_policy
import reference
import results
import reverse_and_forward
import symptoms
import token_and_sequence
import torch
import which_term
from reference.text import table

from klgrad.audit import advice, audit, load, policy_sentences as policies
from klgrad.audit.policy import audit_whole
from klgrad.audit.terminal import COLUMNS, markdown_table
from klgrad.frameworks import FRAMEWORKS, recorded
from klgrad.policy_losses import POLICY_LOSSES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
EXPERIMENTS = DOCS / "experiments"

DEFAULTS = ("trl", "verl", "openrlhf", "skyrl", "ms-swift")
"""Frameworks in the README."""

SHOWN_PARTS = ("KL(π‖ref)?", "divergence", "looks ahead", "samples", "stale samples", "unit", "coefficient")
"""Lines of an audit in the README."""

SHOWN_LINES = ("KL in the loss", "Fresh samples", "actor_rollout_ref.actor.kl_loss_type=")
"""How lines of an advice in the README begin."""


def commands() -> str:
    """Some lines of the output of both commands."""
    result = audit(load(str(ROOT / "examples/losses.py:grpo_k3")))
    parts = dict(advice.rows(result))
    of_loss = [f"{name:<14} {parts[name]}" for name in SHOWN_PARTS]
    command = ("advise", "--config", "examples/verl/run.sh")
    printed = subprocess.run(
        [sys.executable, "-m", "klgrad", *command], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    # A setting is listed before the line that says what to change in it.
    of_run = [line.partition(": k3 as")[0] for line in printed.splitlines() if line.startswith(SHOWN_LINES)]
    lines = ["$ klgrad audit examples/losses.py:grpo_k3", *of_loss, "", f"$ klgrad {' '.join(command)}", *of_run]
    return "```\n" + "\n".join(lines) + "\n```\n"


def defaults() -> str:
    """What the default settings of some frameworks descend, by their recorded audits."""
    rows = []
    for name in DEFAULTS:
        known, default = recorded(name), FRAMEWORKS[name].default
        assert known, f"{name} has no recorded audit: run `make frameworks`"
        cells = dict(zip(known.columns, next(row for row in known.rows if row[0] == default.subject), strict=True))
        shown = (cells[part] for part in ("divergence", "looks ahead", "samples", "unit"))
        rows.append((f"[{name} {known.version}](docs/frameworks/{name}.md)", default.settings, *shown))
    return table(("framework", "default", "divergence", "looks ahead", "samples", "unit"), rows)


def policy_losses() -> str:
    """What each published policy loss does."""
    return policies.to_markdown([audit_whole(entry) for entry in POLICY_LOSSES.values()])


SHOWN_POLICY_LOSSES = (
    "trl grpo loss_type=dapo",
    "trl grpo loss_type=dr_grpo scale_rewards=none use_vllm=True vllm_importance_sampling_mode=sequence_mask",
    "trl grpo loss_type=dr_grpo scale_rewards=none use_vllm=True vllm_importance_sampling_correction=False",
    "trl rloo normalize_advantages=False",
    "verl loss_mode=vanilla",
    "verl loss_mode=gspo",
    "verl loss_mode=cispo",
    "verl loss_mode=gpg",
    "verl rollout_correction rollout_is=token",
    "verl rollout_correction rollout_is=sequence",
    "verl rollout_correction rollout_is=sequence rollout_is_threshold=1000000000.0",
    "openrlhf policy_loss_type=ppo",
    "openrlhf is_correction_level=token is_correction_mode=clip",
    "openrlhf is_correction_level=token is_correction_mode=mask",
    "skyrl policy_loss_type=regular",
    "skyrl policy_loss_type=rollout_is",
    "skyrl policy_loss_type=regular tis_ratio_type=sequence",
    "skyrl policy_loss_type=regular sequence_mask_metric=product",
)


def framework_policy_losses() -> str:
    """A selection of the recorded policy losses of the frameworks."""
    rows = {row[0]: row for name in FRAMEWORKS if (known := recorded(name)) for row in known.policy_losses}
    return markdown_table([rows[name] for name in SHOWN_POLICY_LOSSES], policies.COLUMNS)


def example() -> str:
    """The output of the example in the README."""
    source = re.search(r"<!-- code -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert source, "the README has no `<!-- code -->` block"
    done = subprocess.run([sys.executable, "-c", source.group(1)], capture_output=True, text=True, check=True, cwd=ROOT)
    return f"```\n{done.stdout}```\n"


SHOWN_SETTINGS = (
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    "trl grpo loss_type=grpo importance_sampling_level=sequence use_bias_correction_kl=True",
    "trl grpo loss_type=dr_grpo use_vllm=True",
    "trl rloo normalize_advantages=False",
    "trl distillation beta=1.0",
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean",
    "verl use_kl_loss kl_loss_type=low_var_kl+ loss_agg_mode=seq-mean-token-sum",
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=grpo",
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo",
    "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0",
    "openrlhf algo.kl in reward estimator=k1 advantage=rloo",
    "openrlhf algo.kl.use_loss estimator=k1 unbiased_gradient=False",
    "openrlhf algo.kl.use_loss estimator=k3 unbiased_gradient=True",
    "skyrl use_kl_loss kl_estimator_type=k3",
    "skyrl use_kl_in_reward estimator=k1 advantage=rloo",
    "skyrl use_kl_in_reward estimator=k1 advantage=rloo tis=sequence uncapped",
    "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    "ms-swift loss_type=grpo",
    "ms-swift kl_in_reward advantage_estimator=rloo loss_type=dr_grpo",
    "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    "trinity kl_loss_fn=k2 loss_agg_mode=token-mean",
    "nemo-rl reference_policy_kl_type=k3 token_level_loss=True",
    "prime-rl trainer.loss.type=default kl_tau",
    "prime-rl algorithm=opd",
    "slime --use-kl-loss --kl-loss-type k1",
    "slime --use-kl-loss --kl-loss-type low_var_kl",
    "slime --kl-coef --advantage-estimator grpo",
    "open-instruct kl_estimator=2 loss_denominator=token",
    "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0",
    "tinker-cookbook distillation kl_penalty_coef kl_discount_factor=0.0",
)


def frameworks() -> str:
    """A selection of rows of the recorded audits, with each framework's version and the date of its audit."""
    shown, made = [], {}
    for name, framework in FRAMEWORKS.items():
        known = recorded(name)
        assert known, f"{name} has no recorded audit: run `make frameworks`"
        of = "formulae transcribed from their source" if framework.transcribed else "their own code"
        made.setdefault((of, known.date), []).append(f"[{name} {known.version}](frameworks/{name}.md)")
        rows = {row[0]: row for row in known.rows}
        shown += [rows[setting] for setting in SHOWN_SETTINGS if setting in rows]
    audited = [f"Audited on {date}, {of}: {', '.join(pages)}.\n" for (of, date), pages in made.items()]
    return "\n".join([*audited, markdown_table(shown, COLUMNS)])


BENCHMARKS = ROOT / "benchmarks" / "results"


def kernels() -> str:
    """The timings of the kernels: a table for each benchmark and shape."""
    return (
        "\n".join(
            [
                _timings("exact", "exact KL, both directions, entropy and log-probs"),
                _timings("sampled", "log-prob alone"),
            ]
        )
        + _linear()
    )


def _timings(name: str, title: str) -> str:
    rows = _rows(f"kernels_{name}")
    one, lines = rows[0], []
    for hidden, size in dict.fromkeys((row["hidden"], row["vocabulary"]) for row in rows):
        folded = lines != []
        lines += [f'<details markdown="1"><summary>{title}: hidden {hidden}</summary>', ""] if folded else []
        lines += [
            f"| {title}: hidden {hidden}, vocabulary {size} | time | times the floor | memory |",
            "|---|---|---|---|",
        ]
        lines += [_line(row, one) for row in rows if (row["hidden"], row["vocabulary"]) == (hidden, size)]
        lines += ["", "</details>", ""] if folded else [""]
    rounds = f"{one['rounds']} rounds, " if one.get("rounds") else ""
    made = f"{one['gpu']}, torch {one['torch']}, Triton {one['triton']}, {rounds}commit {one['commit']}, {one['date']}"
    libraries = [
        x for x in dict.fromkeys(row.get("library") or "" for row in rows) if x and not re.fullmatch(r"torch \S+", x)
    ]
    return "\n".join([*lines, f"*{'; '.join([made, *libraries])}*", ""])


def _line(row: dict[str, str], first: dict[str, str]) -> str:
    """One candidate: its numbers, or why it did not run; a row of another run than the first says of which."""
    if row["commit"] != first["commit"]:
        made = f"{row['library']}, {row['rounds']} rounds, commit {row['commit']}, {row['date']}"
        row = {**row, "candidate": f"{row['candidate']}: {made}"}
    if row.get("failure"):
        why = shorten(re.sub(r"[|`]", " ", row["failure"]), 60, placeholder=" ...")
        # A name in angle brackets would be a tag of the page; inside <details> it is one even as code.
        return f"| {row['candidate']} | did not run: {escape(why, quote=False)} | | |"
    floor = f"{float(row['times_floor']):.2f}" if row["times_floor"] else ""
    memory = f"{row['extra_gib']} GiB" if row["floor"] else ""
    return f"| {row['candidate']} | {row['median_ms']} ms | {floor} | {memory} |"


def _linear() -> str:
    rows = _rows("kernels_linear")
    shape = f"hidden {rows[0]['hidden']}, vocabulary {rows[0]['vocabulary']}"
    heads = (f"exact KL, {shape}: tokens", "lean", "per 1000 tokens", "memory beside the gradients")
    each = lambda row: f"{1000 * float(row['median_ms']) / int(row['tokens']):.2f} ms"
    return "\n" + table(
        heads, ((row["tokens"], f"{row['median_ms']} ms", each(row), f"{row['extra_gib']} GiB") for row in rows)
    )


BETWEEN_KERNELS = "between kernels"
"""A kind of the profile that is no kernel."""


def profile() -> str:
    """Kernel times of our exact KL by kind and hidden size, their sums, and the time of a step beside them."""
    spent: dict[str, dict[str, dict[str, float]]] = {}
    for row in _rows("kernels_profile"):
        spent.setdefault(row["candidate"], {}).setdefault(row["kernels"], {})[row["hidden"]] = float(row["ms"])
    sizes = list(dict.fromkeys(row["hidden"] for row in _rows("kernels_profile")))
    steps = {(row["candidate"], row["hidden"]): float(row["median_ms"] or "nan") for row in _rows("kernels_exact")}
    lines = [
        "| | kernels | " + " | ".join(f"hidden {size}" for size in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    cells = lambda of: " | ".join(f"{of(size):.2f} ms" for size in sizes)
    for name in ("4 projections", "klgrad lean", "klgrad fast"):
        kinds = spent[name]
        total = lambda size, kinds=kinds: sum(found[size] for kind, found in kinds.items() if kind != BETWEEN_KERNELS)
        if name.startswith("klgrad"):
            lines += [f"| {name} | {kind} | {cells(found.__getitem__)} |" for kind, found in kinds.items()]
        lines.append(f"| {name} | all kernels | {cells(total)} |")
        step_of = lambda size, name=name: steps[name, size]
        lines.append(f"| {name} | a step of the table above | {cells(step_of)} |")
    return "\n".join([*lines, ""])


def step() -> str:
    """The memory of a whole RL step, counted and measured."""
    rows = [row for row in _rows("step") if row["predicted_gib"]]
    text = lambda x: f"{x['beyond_activations_gib']} (counted {x['predicted_gib']}), {x['median_ms']} ms"
    return _crossed({(row["candidate"], f"{row['tokens']} tokens"): text(row) for row in rows}, "")


def divergences(file: str, unit: str, ms: float, digits: int) -> str:
    """Time and memory of a forward and backward pass, by divergence and hidden size.

    Args:
        file: the benchmark's rows.
        unit: of the times in the table.
        ms: milliseconds in this unit.
        digits: decimals of the times.
    """
    return _crossed(
        {
            (
                row["candidate"],
                f"{row['benchmark']}, {row['hidden']}",
            ): f"{float(row['median_ms']) / ms:.{digits}f} {unit}"
            + (f", {row['extra_gib']} GiB" if row["floor"] else "")
            for row in _rows(file)
        },
        "divergence, hidden size",
    )


NOISE = "sampled: noise"
TAILS = {
    "lump": "lump",
    "none": "none",
    "none, renormalised": "renormalised",
    "each entry clipped at 0.05": "clipped at 0.05",
    "sampled": NOISE,
    "": NOISE,
    "less its mean at the prefix": NOISE,
}
"""Columns of the table of top k, by what the benchmark calls the treatment of the other entries."""


def top_k() -> str:
    """Bias and noise of a gradient over some of the entries, at both temperatures."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in _rows("topk_bias"):
        direction, entries, tail = row["divergence"], row["entries"], row["tail"]
        wanted = direction == "reverse" or entries in ("teacher's", "all")
        if not wanted or row["k"] not in ("", "64") or tail not in TAILS:
            continue
        of = {"all": "all entries", "sampled": f"sampled token{', `token_kl`' * bool(tail)}"}.get(
            entries, f"{entries} 64"
        )
        name = f"{direction}, {of}, {row['student'].split()[0]} layers"
        number = float(row["noise" if TAILS[tail] == NOISE else "bias"])
        cells.setdefault((name, TAILS[tail]), []).append(f"{number:.0f}" if number >= 10 else f"{number:.2g}")
        if tail == "lump":
            cells.setdefault((name, "mass"), []).append(f"{float(row['mass']):.2f}")
    columns = ("mass", *dict.fromkeys(TAILS.values()))
    ordered = sorted(cells, key=lambda key: columns.index(key[1]))
    return _crossed({key: "{} ({})".format(*cells[key]) for key in ordered}, "")


def stale_top_k() -> str:
    """The KL of students that were trained with fresh and with old completions."""
    found = {}
    for row in _rows("stale_topk"):
        age = "fresh" if row["age"] == "0" else f"{row['age']} updates old"
        found[row["arm"], age] = f"{float(row['kl']):.2f} ± {float(row['kl_error']):.2f}"
        if row["age"] != "0":
            found[row["arm"], "cost"] = f"{float(row['cost']):+.0%} ± {float(row['cost_error']):.0%}"
    return _crossed(found, "")


def distillation() -> str:
    """Every setting at its best learning rate, sorted by the distance to the teacher."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in [*_rows("distill_sweep"), *_rows("distill_seeds")]:
        found.setdefault((row["setting"], row["learning_rate"]), []).append(row)
    mean = lambda rows, name: sum(float(row[name]) for row in rows) / len(rows)
    near = sorted(found.items(), key=lambda item: mean(item[1], "kl_per_token"))
    best: dict[str, tuple[str, ...]] = {}
    for (setting, rate), rows in near:
        each = [float(row["kl_per_token"]) for row in rows]
        error = f" ± {stdev(each) / len(each) ** 0.5:.3f}" if rate and len(each) > 1 else ""
        who = {"True": "klgrad", "False": "others", "": ""}[rows[0]["own"]]
        means = (f"{mean(rows, name):.1f}" for name in ("kl_per_completion", "length"))
        kl = f"{mean(rows, 'kl_per_token'):.3f}{error}"
        best.setdefault(setting, (setting, who, rate, str(len(rows)) if rate else "", kl, *means))
    heads = ("setting", "whose", "learning rate", "seeds", "KL, nats per token", "per completion", "tokens")
    return table(heads, best.values())


def trainer_cost() -> str:
    """The time of a training step relative to TRL with its own KL."""
    found = {}
    for row in _rows("trainer_step"):
        low, high = (f"{float(row[f'times_trl_{end}']):.2f}" for end in ("low", "high"))
        around = f" ({low} to {high})" if low != high else ""
        size = f"{row['completions']} x {row['length']} tokens"
        found[row["candidate"], size] = f"{float(row['times_trl']):.2f}{around}"
    return _crossed(found, "")


def trainer_memory() -> str:
    """Peak memory of a step in addition to models and optimizer, by vocabulary."""
    rows = _rows("trainer_memory")
    return _crossed({(row["vocabulary"], row["candidate"]): row["extra_gib"] for row in rows}, "vocabulary")


def _crossed(cells: dict[tuple[str, str], str], corner: str) -> str:
    """A table of cells, given by row and column; missing cells stay empty."""
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    return table((corner, *columns), ((row, *(cells.get((row, column), "") for column in columns)) for row in rows))


def _rows(name: str) -> list[dict[str, str]]:
    with (BENCHMARKS / f"{name}.csv").open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "commands": commands,
        "defaults": defaults,
        "example": example,
    },
    DOCS / "frameworks.md": {
        "frameworks": frameworks,
        "policy losses": policy_losses,
        "framework policy losses": framework_policy_losses,
    },
    DOCS / "layout.md": {"files": layout.files},
    DOCS / "which-term.md": {"settings": which_term.settings},
    DOCS / "footguns.md": footguns.parts(),
    DOCS / "concepts.md": {
        "token and sequence": token_and_sequence.numbers,
        "reverse and forward": reverse_and_forward.numbers,
        "on- and off-policy": on_and_off_policy.numbers,
        "large batches": large_batches.numbers,
    },
    DOCS / "distil.md": {"top k": top_k, "stale top k": stale_top_k},
    DOCS / "kernels.md": {
        "kernels": kernels,
        "profile": profile,
        "step": step,
        "other divergences": lambda: divergences("kernels_divergences", "ms", 1.0, 1),
        "on a CPU": lambda: divergences("kernels_divergences_cpu", "s", 1000.0, 2),
    },
    DOCS / "symptoms.md": {"symptoms": symptoms.symptoms, "threads": symptoms.threads},
    DOCS / "experiments.md": {"verdict counts": results.counts_by_experiment, "survivors": experiments.surviving},
    DOCS / "papers.md": {"verdict counts": results.counts_by_paper},
    EXPERIMENTS / "reward-and-kl.md": {
        "baselines": experiments.baselines,
        "baselines claims": lambda: experiments.checks_of("baselines"),
        "frontier": experiments.frontier,
        "frontier claims": lambda: experiments.checks_of("tang-munos/fig7"),
        "long runs": experiments.long_runs,
        "long pairs": experiments.long_pairs,
        "long claims": lambda: experiments.checks_of("tang-munos/long-runs"),
    },
    EXPERIMENTS / "places.md": {
        "on-policy": experiments.on_policy,
        "on-policy claims": lambda: experiments.checks_of("comedy/on-policy"),
        "on-policy curve": experiments.on_policy_curve,
        "rethinking": experiments.rethinking,
        "rethinking claims": lambda: experiments.checks_of("rethinking/language-model"),
    },
    EXPERIMENTS / "division.md": {
        "kl in reward": experiments.kl_in_reward,
        "comparisons": experiments.comparisons,
        "curve": experiments.division_curve,
        "division claims": lambda: experiments.checks_of("frpo/kl-in-reward"),
    },
    EXPERIMENTS / "stale-completions.md": {
        "asynchronous": experiments.asynchronous,
        "long asynchronous": experiments.long_asynchronous,
        "k1 as a loss": experiments.k1_loss,
        "asynchronous claims": lambda: experiments.checks_of("comedy/asynchronous"),
        "weighted": experiments.weighted,
    },
    EXPERIMENTS / "distillation.md": {
        "fig8": experiments.fig8,
        "fig8 runs": experiments.fig8_runs,
        "fig8 claims": lambda: experiments.checks_of("tang-munos/fig8"),
        "discount rates": experiments.discount_rates,
        "discount": experiments.discount,
        "discount at one rate": experiments.discount_one_rate,
        "discount comparisons": experiments.discount_comparisons,
        "gradients": experiments.gradients,
        "discount claims": lambda: experiments.checks_of("klgrad/discount"),
    },
    EXPERIMENTS / "stale-distillation.md": {
        "stale distillation": experiments.stale_distillation,
        "stale costs": experiments.stale_costs,
        "stale claims": lambda: experiments.checks_of("asyncopd/stale-distillation"),
        "reuse": experiments.reuse,
        "reuse sweep": experiments.reuse_sweep,
        "reuse claims": lambda: experiments.checks_of("klgrad/reuse"),
    },
    DOCS / "train.md": {
        "distillation": distillation,
        "trainer cost": trainer_cost,
        "trainer memory": trainer_memory,
    },
}


def main() -> int:
    """Write or check what is generated; the exit status is 1 if something checked is stale."""
    torch.set_num_threads(1)
    stale = [str(page.relative_to(ROOT)) for page, parts in PARTS.items() if not _up_to_date(page, parts)]
    stale += _stale_pages()
    if "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}: run `make readme`" if stale else "generated parts are up to date")
        return int(bool(stale))
    return 0


def _up_to_date(page: Path, parts: dict[str, Callable[[], str]]) -> bool:
    old = new = page.read_text(encoding="utf-8")
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert pattern.search(new), f"{page.name} has no part {name!r}"
        text = make()
        new = pattern.sub(lambda found, text=text: found.group(1) + text + found.group(2), new)
    if "--check" not in sys.argv[1:]:
        page.write_text(new, encoding="utf-8")
    return old == new


def _stale_pages() -> list[str]:
    """Generated pages and notebooks that differ, are missing or are left over. Without --check they are put right."""
    made = {DOCS / path: text for path, text in reference.pages().items()} | notebooks.notebooks()
    there = {
        path: path.read_text(encoding="utf-8")
        for folder in (*reference.FOLDERS, "notebooks")
        for path in (DOCS / folder).glob("*.*")
    }
    stale = sorted(path for path in {*made, *there} if made.get(path) != there.get(path))
    for path in stale if "--check" not in sys.argv[1:] else ():
        if path in made:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
        else:
            path.unlink()
    return [str(path.relative_to(ROOT)) for path in stale]


if __name__ == "__main__":
    sys.exit(main())
