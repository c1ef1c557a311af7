"""What a run prints and writes: objective, dry run, memory, messages, summary and model card."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..audit import AuditResult, audit
from ..audit.sentences import summary
from ..frameworks.trl import audited_settings, declared
from ..integrations import needs_no_weights
from ..kernels import make_plan
from ..models import EMBEDDED, SOURCE
from ..support import Json, text_table
from ..trl import KLConfig
from ..trl.config import notes, stale
from . import run_folder
from .build import Models
from .checkpoint import checkpoints, last_complete, step_of
from .run_folder import HISTORY, evaluations, in_updates, kl_of, length_of, results_of_a_run, training, versions
from .settings import RunSettings, resume_command

# The objective of a run in words: what it maximises, how tokens are weighted, and what rescales β.

PER_COMPLETION = "summed over each completion"
TOKEN_WEIGHTS = {
    "grpo": "averaged over each completion's tokens (loss_type grpo)",
    "sapo": "averaged over each completion's tokens (loss_type sapo)",
    "bnpo": "divided by the tokens of one forward pass (loss_type bnpo)",
    "dr_grpo": "divided by max_completion_length (loss_type dr_grpo)",
    "dapo": "divided by all tokens of the update (loss_type dapo)",
    "cispo": "divided by all tokens of the update (loss_type cispo)",
    "vespo": "divided by all tokens of the update (loss_type vespo)",
    "luspo": f"{PER_COMPLETION} (loss_type luspo)",
}
"""How TRL's policy loss weights a token; with kl_reduction='policy' the KL has the same weights."""


def objective(settings: RunSettings) -> str:
    """One line such as `E[reward] - 0.02 KL(π‖ref)`."""
    training = settings.training
    reward = "E[reward] - " if settings.rewarded else "-"
    beta = "β" if training.kl_target is not None else f"{training.kl_coef:g}"
    if training.objective.cell is not None:
        return f"{reward}{beta} x {training.kl_cell}, a cell for study"
    term = training.objective.term
    assert term is not None  # an objective has a term or a cell
    name = term.formula.divergence
    return f"{reward}{beta} {f'({name})' if ' + ' in name else name}"


def formula(settings: RunSettings) -> str:
    """The gradient of the KL term, with the weights of its tokens."""
    objective = settings.training.objective
    formula, why = objective.formula, stale(settings.training)
    if formula is None or objective.term is None:
        assert objective.cell is not None  # an objective has a term or a cell
        return f"{objective.cell.name} (a cell for study): {objective.cell.summary} {reduction(settings)}"
    formula = replace(formula, unit=reduction(settings))
    if why is not None and needs_no_weights(objective.term):
        formula = replace(
            formula,
            where=" of the next token, at the prefixes of μ",
            sampler="μ",
            sampling=f"μ is what sampled the completions ({why})",
        )
    return str(formula)


def reduction(settings: RunSettings) -> str:
    training = settings.training
    if training.kl_placement == "reward" or training.objective.reduction == "sequence":
        return PER_COMPLETION
    return TOKEN_WEIGHTS.get(str(training.loss_type), f"weighted as the policy loss ({training.loss_type})")


def scaling(settings: RunSettings) -> str | None:
    """How TRL's normalisation of rewards rescales β; None if it does not. A KL in the reward has a note instead."""
    training = settings.training
    divisor = {"group": "their group's", "batch": "the batch's"}.get(str(training.scale_rewards))
    if training.multi_objective_aggregation == "normalize_then_sum":
        divisor = "first each its group's and then the batch's"
    if divisor is None or not settings.rewarded or training.kl_placement == "reward":
        return None
    return f"rewards are divided by {divisor} standard deviation (scale_rewards), which rescales β against them"


# What a run trains, in words: the audit of the trainer's own loss with the settings of the run.

OVER_ALL_TOKENS = ("dapo", "cispo", "vespo")
"""Loss types that divide by the tokens of all completions of a generation, of all processes."""


def audit_lines(training: KLConfig) -> list[str]:
    """What the KL of a run descends: a line for fresh samples, and one for stale ones where there are any."""
    if training.kl_coef == 0:
        return ["no KL: kl_coef is 0"]
    result = audited(training)
    unit = f"mean over the tokens of {completions_in_mean(training)} completions"
    lines = [f"on fresh samples: {summary(result.anatomy).replace('mean over tokens', unit)}"]
    why = stale(training)
    if why is not None:
        descends = summary(result.anatomy, on_policy=False)
        lines.append(f"on stale samples ({why}), {_ratio(training)}: {descends}")
    return lines


def audited(training: KLConfig) -> AuditResult:
    """The audit of the trainer's loss."""
    settings = audited_settings(training)
    if training.loss_type == "bnpo" and completions_in_mean(training) == 1:
        settings["loss_type"] = "grpo"  # the tokens of a forward pass are those of one completion
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors of an audit are so small that more threads slow it down
    try:
        return audit(declared(**settings))
    finally:
        torch.set_num_threads(threads)


def completions_in_mean(training: Any) -> int:
    """How many completions share the statistics of a batch, such as its number of tokens."""
    if training.objective.reduction == "policy" and training.loss_type in OVER_ALL_TOKENS:
        return training.generation_batch_size
    alone = training.objective.reduction == "policy"  # a loss of the zoo with its own reduction sees all processes
    return training.per_device_train_batch_size * (1 if alone else training.world_size)


def _ratio(training: KLConfig) -> str:
    if training.kl_placement != "loss":
        return f"with the ratio of TRL's policy loss, since the KL is in the {training.kl_placement}"
    if training.objective.is_weighted:
        return f"weighted by kl_ratio={training.kl_ratio!r}, kl_ratio_bound={training.kl_ratio_bound!r}"
    return "with kl_ratio='none'"


# Estimate the memory of a run from the models' configurations, without loading weights.
#
# `accelerate estimate-memory` covers one model of the hub; here are two, from folders too, with adapters, the cache of
# sampling and the tiles of the exact KL.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_COUNTED = ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "load_in_4bit", "load_in_8bit")
"""Settings that change the memory, but not the estimate."""

Item = tuple[str, float, str]
"""What needs memory, its bytes, and a note."""


def estimate(settings: RunSettings, models: Models) -> list[Item]:
    """Memory of all processes together, as if every model were sharded; activations are not included."""
    training: Any = settings.training  # TRL has replaced every None that is added or multiplied here
    policy = settings.policy
    kind = DTYPES.get(str(policy.dtype), torch.float32)
    config, parameters = _size_of(models.path, models.load_options)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    trained, of_what = parameters, "weights"
    if policy.use_peft:  # two low-rank matrices for queries and values of each layer, PEFT's default for a Llama
        trained = config.num_hidden_layers * policy.lora_r * (3 * config.hidden_size + heads * width)
        of_what = "adapters of queries and values"
    items: list[Item] = [
        ("policy", parameters * kind.itemsize, f"{_millions(parameters)} in {str(kind).removeprefix('torch.')}"),
        ("gradients", trained * kind.itemsize, f"of {trained / 1e6:.0f}M {of_what}"),
        ("optimizer", 2 * trained * kind.itemsize, "two numbers for each (AdamW)"),
    ]
    if policy.use_peft:
        items.append(("reference", 0, "the policy with its adapters off"))
    else:
        _, others = _size_of(models.reference, models.reference_options)
        items.append(("reference", others * kind.itemsize, _millions(others)))
    if training.use_vllm:
        items.append(("sampling", 0, "vLLM allocates its own memory"))
    else:
        rows, tokens = training.generation_batch_size, training.max_completion_length
        size = rows * tokens * config.num_hidden_layers * 2 * heads * width * kind.itemsize
        note = f"keys and values of {rows} completions x {tokens} tokens, prompts not included"
        items.append(("sampling", size, note))
    if training.objective.exact:
        tokens = training.per_device_train_batch_size * training.max_completion_length
        plan = make_plan(tokens, config.vocab_size, kind, paired=True, budget=training.kl_memory << 20)
        whole = 2 * tokens * config.vocab_size * 4 * training.world_size
        tiles = (plan.tile_bytes + plan.kept_bytes) * training.world_size
        saved = f"; all logits of both models would be {in_units(whole)}" if whole > tiles else ""
        items.append(("exact KL", tiles, f"tiles of {plan.strip} x {plan.columns} logits{saved}"))
    ignored = [name for name in NOT_COUNTED if getattr(policy, name)]
    note = f"does not account for {', '.join(ignored)}" if ignored else ""
    return [*items, ("total", sum(size for _, size, _ in items), note)]


def _size_of(model: str, how: Json) -> tuple[Any, int]:
    """The configuration of a model's text part, and its number of parameters."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, **how)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=how.get("trust_remote_code", False))
    empty.tie_weights()  # otherwise a shared head is counted twice
    return config.get_text_config(), sum(p.numel() for p in empty.parameters())


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M weights"


def in_units(count: float) -> str:
    """MiB, or GiB from one GiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# `--dry-run`: the objective, what the trainer's loss descends, the settings, and the memory.


def describe(settings: RunSettings, models: Models) -> RenderableType:
    heading = "What its KL descends: the trainer's own loss, taken apart"
    memory = "Memory of all processes together, with each model counted once; activations are not included"
    items = estimate(settings, models)
    sizes = text_table(((name, in_units(size), Text(note, style="dim")) for name, size, note in items), columns=3)
    sizes.columns[1].justify, sizes.columns[1].no_wrap = "right", True
    return Group(
        Text("Maximises", style="bold"),
        *(Text(f"  {line}") for line in objective_lines(settings)),
        "",
        Text(heading, style="bold"),
        *(Text(f"  {line}") for line in audit_lines(settings.training)),
        "",
        text_table((Text(name, style="bold"), value) for name, value in facts(settings, models).items()),
        "",
        Text(memory, style="bold"),
        sizes,
    )


def objective_lines(settings: RunSettings) -> list[str]:
    """The objective, its gradient, what rescales it, and notes on settings that change its meaning."""
    lines = (objective(settings), formula(settings), scaling(settings))
    return [*(line for line in lines if line is not None), *(f"note: {note}" for note in notes(settings.training))]


def facts(settings: RunSettings, models: Models) -> dict[str, str]:
    training: Any = settings.training
    per_update = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    reference = "the model as it starts"
    if training.teacher:
        reference = f"the teacher {models.reference_name}"
    elif training.sync_ref_model:
        reference += f", moved towards the policy every {training.ref_model_sync_steps} updates"
    beta = f"{training.kl_coef:g}, constant"
    if training.kl_target is not None:
        beta = f"from {training.kl_coef:g}, adapted to {training.kl_target:g} nats per {training.kl_target_unit}"
    length = f"{training.max_steps} updates" if training.max_steps > 0 else f"{training.num_train_epochs:g} epochs"
    trains = (
        f"{length} of {per_update // training.num_generations} prompts x {training.num_generations} completions "
        f"of at most {training.max_completion_length} tokens"
    )
    if training.num_iterations > 1:
        trains += f", each of which is used for {training.num_iterations} updates"
    if training.world_size > 1:
        trains += f", on {training.world_size} processes"
    scheduler = getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)
    facts = {
        "model": models.name,
        "reference": reference,
        "placement": f"in the {training.kl_placement}; {reduction(settings)}",
        "β": beta,
        "trains": trains,
        "learning rate": f"{training.learning_rate:g}, {scheduler}",
    }
    if training.rollout_lag:
        facts["lag"] = f"{training.rollout_lag} updates, ratio {training.kl_ratio}"
    return facts


# Sentences about a run: what is saved when it stops, and what it has left.


def how_to_continue(settings: RunSettings, folder: Path) -> str:
    """What of the run is on disk, and the command that continues it."""
    checkpoint = last_complete(folder)
    if checkpoint is not None:
        again = resume_command(settings.command, folder, settings.given)
        return f"The run is saved after {in_updates(step_of(checkpoint))} in {checkpoint}. Continue with: {again}"
    more = ["--overwrite"] if results_of_a_run(folder) else []
    again = resume_command(settings.command, folder, settings.given, *more)
    return f"Nothing has been saved yet. Start again with: {again}"


NO_CHECKPOINT = "There is no complete checkpoint to make the run longer from: --weights_only false keeps them"


def finished_message(folder: Path, updates: int) -> str:
    """What is said of a run that is finished; it can be made longer only from a complete checkpoint."""
    longer = "To make it longer, give a larger --max_steps with --resume" if last_complete(folder) else NO_CHECKPOINT
    return f"The run in {folder} is finished, after {in_updates(updates)}; nothing was changed. {longer}."


def folder_contents(folder: Path) -> str:
    """What a finished run has left in its folder."""
    names = (run_folder.MODEL, *run_folder.FIGURES, run_folder.SUMMARY, HISTORY)
    parts = [name for name in names if (folder / name).exists()]
    if saved := checkpoints(folder):
        return f"In {folder}/: {', '.join(parts)}, {len(saved)} checkpoint{'s' * (len(saved) > 1)}"
    return f"In {folder}/: {', '.join(parts)}. {NO_CHECKPOINT}"


# The results of a run, as data and as a table.


def summarise(rows: list[Json]) -> Json:
    """Of a history: evaluations before and after, and means over the last tenth of the updates."""
    trained, evaluated = training(rows), evaluations(rows)
    last = trained[-max(1, len(trained) // 10) :]
    first = evaluated[0] if evaluated and evaluated[0]["step"] == 0 else None  # its beginning may be lost
    return {
        "updates": max((row["step"] for row in rows), default=0),
        "before": first["evaluation"] if first else None,
        "after": evaluated[-1]["evaluation"] if evaluated else None,
        "after_updates": evaluated[-1]["step"] if evaluated else None,
        "last_updates": {
            "count": len(last),
            "task_reward": _mean([row.get("task_reward") for row in last]),
            "kl_per_sequence": _mean([kl_of(row) for row in last]),
            "kl_per_token": _mean([kl_of(row, "per_token") for row in last]),
            "length": _mean([length_of(row) for row in last]),
            "coefficient": _mean([row.get("kl/coef") for row in last]),
        },
    }


def result_rows(summary: Json) -> list[list[str]]:
    """Before and after, task by task; a cell is empty if there was no evaluation then."""
    columns, rows = [summary["before"], summary["after"]], list[list[str]]()
    if summary["after"] is None:
        return rows
    for name, row in summary["after"]["sets"].items():
        domain = "in-domain" if row["domain"] == "in" else "out-of-domain"
        scores = [score(column["sets"].get(name)) if column else "" for column in columns]
        rows.append([f"{name} ({domain}, {row['count']})", *scores])
    for unit, title in (("per_token", "KL, nats per token"), ("per_sequence", "KL, nats per completion")):
        if all(column is None or column["kl"] is not None for column in columns):  # greedy completions have none
            rows.append([title, *(format_estimate(column["kl"][unit]) if column else "" for column in columns)])
    rows += _distillation_rows(columns)
    return [*rows, ["tokens per completion", *(f"{column['length']:.1f}" if column else "" for column in columns)]]


def table_of(summary: Json) -> Table:
    heads = ("held out", "before", f"after {summary['after_updates']} updates")
    return text_table(result_rows(summary), heads, numbers=1)


def _distillation_rows(columns: list[Json | None]) -> list[list[str]]:
    """Answers of the student and its teachers, KL(teacher‖student) and the overlap, where they were evaluated."""
    comparisons = [None if column is None else column.get("distillation") for column in columns]
    last, rows = comparisons[-1], list[list[str]]()
    if last is None:
        return rows
    for name, by_decoding in last["rewards"].items():
        for how, domains in by_decoding.items():
            for domain in domains:
                where = "in-domain" if domain == "in" else "out-of-domain"
                scores = [score(x["rewards"][name][how].get(domain)) if x else "" for x in comparisons]
                rows.append([f"{name}, {how} ({where})", *scores])
    if "forward_kl" in last:
        kls = [format_estimate(x["forward_kl"]["per_token"]) if x else "" for x in comparisons]
        rows.append(["KL(teacher‖student), nats per token", *kls])
    if "overlap" in last:
        titles = {"student_on_teachers": "student's mass on the teacher's top {}"}
        titles["teacher_on_students"] = "teacher's mass on the student's top {}"
        for name, title in titles.items():
            masses = [format_estimate(x["overlap"][name]) if x else "" for x in comparisons]
            rows.append([title.format(last["overlap"]["k"]), *masses])
    return rows


def score(row: Json | None) -> str:
    """A mean reward, with its standard error unless there was only one prompt."""
    if row is None:
        return ""
    error = row["standard_error"]
    return f"{row['reward']:.3f}" + ("" if error is None or math.isnan(error) else f" ± {error:.3f}")


def format_estimate(row: Json) -> str:
    """A KL with its standard error; the history has None for a number that was not finite."""
    if row["mean"] is None:
        return "not finite"
    error = row["standard_error"]
    return f"{row['mean']:.3g}" + ("" if error is None else f" ± {error:.2g}")


def _mean(values: list[float | None]) -> float | None:
    numbers = [x for x in values if x is not None]
    return sum(numbers) / len(numbers) if numbers else None


# The model card of a run: its base model, its KL, and its results.

CARD = "README.md"


def model_card(settings: RunSettings, models: Models, summary: Json | None = None) -> str:
    """`README.md` of a run, with the metadata that the hub reads, and with its results if it is finished."""
    base, rescaled, run = name_on_hub(models.name), scaling(settings), settings.run
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {base}"] if base else []),
        "tags: [klgrad, trl, grpo]",
        "---\n",
        f"# {Path(str(settings.training.output_dir)).name}\n",
        f"Trained by `klgrad {settings.command}`, on TRL's GRPOTrainer.\n",
        f"- base model: {_named(models.name)}",
        f"- reference of the KL: {_named(models.reference_name)}",
        f"- maximises: {objective(settings)}",
        f"- gradient of the KL: {formula(settings)}",
        *([f"- {rescaled}"] if rescaled else []),
        f"- trained on: {run.task}{f', reward {run.reward}' if run.reward else ''}",
    ]
    if summary is not None:
        lines.append(f"- updates: {summary['updates']}")
        if rows := result_rows(summary):
            lines += ["\n| held out | before | after |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
            lines.append("\nA number after ± is one standard error.")
    lines.append(f"\nVersions: {', '.join(f'{name} {version}' for name, version in versions().items())}.\n")
    return "\n".join(lines)


def name_on_hub(name: str) -> str | None:
    """The name on the hub of a model, without what was done to its layers; None for a folder."""
    base = name.partition(" with ")[0].partition(":")[0]
    if base == EMBEDDED:
        return SOURCE
    return None if Path(base).exists() or base.count("/") != 1 else base


def _named(name: str) -> str:
    return f"{name} ({SOURCE})" if name.partition(":")[0].partition(" ")[0] == EMBEDDED else name
