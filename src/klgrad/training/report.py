"""What a run prints and writes: its objective, a dry run with its memory, messages, its results and its card."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from trl import get_peft_config  # pyright: ignore[reportPrivateImportUsage]

from ..audit import AuditResult, audit
from ..audit.sentences import summary
from ..frameworks.trl import audited_settings, declared
from ..integrations import needs_no_weights
from ..kernels import make_plan
from ..models import EMBEDDED, SOURCE
from ..support import Json, text_table
from ..trl import KLConfig
from ..trl.config import notes, stale
from .build import Models
from .checkpoint import last_complete, step_of
from .run_folder import evaluations, in_updates, kl_of, length_of, results_of_a_run, training
from .settings import RunSettings, resume_command

# The objective of a run in words: what it maximises, how tokens are weighted, and what rescales β.

PER_COMPLETION = "summed over each completion"
OVER_ALL_TOKENS = ("dapo", "cispo", "vespo")
"""Loss types that divide by the tokens of all completions of a generation, of all processes."""
TOKEN_WEIGHTS = {
    **dict.fromkeys(("grpo", "sapo"), "averaged over each completion's tokens"),
    "bnpo": "divided by the tokens of one forward pass",
    "dr_grpo": "divided by max_completion_length",
    **dict.fromkeys(OVER_ALL_TOKENS, "divided by all tokens of the update"),
    "luspo": PER_COMPLETION,
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
    weights = TOKEN_WEIGHTS.get(str(training.loss_type), "weighted as the policy loss")
    return f"{weights} (loss_type {training.loss_type})"


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


def audit_lines(training: KLConfig) -> list[str]:
    """What the KL of a run descends: a line for fresh samples, and one for stale ones where there are any."""
    if training.kl_coef == 0:
        return ["no KL: kl_coef is 0"]
    anatomy = audited(training).anatomy
    unit = f"mean over the tokens of {completions_in_mean(training)} completions"
    lines = [f"on fresh samples: {summary(anatomy).replace('mean over tokens', unit)}"]
    if (why := stale(training)) is not None:
        lines.append(f"on stale samples ({why}), {_ratio(training)}: {summary(anatomy, on_policy=False)}")
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
    alone = training.objective.reduction == "policy"  # a loss of the zoo with its own reduction sees all processes
    if alone and training.loss_type in OVER_ALL_TOKENS:
        return training.generation_batch_size
    return training.per_device_train_batch_size * (1 if alone else training.world_size)


def _ratio(training: KLConfig) -> str:
    if training.kl_placement != "loss":
        return f"with the ratio of TRL's policy loss, since the KL is in the {training.kl_placement}"
    if training.objective.is_weighted:
        return f"weighted by kl_ratio={training.kl_ratio!r}, kl_ratio_bound={training.kl_ratio_bound!r}"
    return "with kl_ratio='none'"


# `--dry-run`: the objective, what the trainer's loss descends, the settings, and the memory.


def describe(settings: RunSettings, models: Models) -> RenderableType:
    return Group(
        Text("Maximises", style="bold"),
        *(Text(f"  {line}") for line in objective_lines(settings)),
        "",
        Text("What its KL descends: the trainer's own loss, taken apart", style="bold"),
        *(Text(f"  {line}") for line in audit_lines(settings.training)),
        "",
        text_table((Text(name, style="bold"), value) for name, value in facts(settings, models).items()),
    )


def objective_lines(settings: RunSettings) -> list[str]:
    """The objective, its gradient, what rescales it, and notes on settings that change its meaning."""
    lines = (objective(settings), formula(settings), scaling(settings))
    return [*(line for line in lines if line is not None), *(f"note: {note}" for note in notes(settings.training))]


def amount(training: Any) -> str:
    """How many updates of how many completions."""
    per_update = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    length = f"{training.max_steps} updates" if training.max_steps > 0 else f"{training.num_train_epochs:g} epochs"
    parts = [
        f"{length} of {per_update // training.num_generations} prompts x {training.num_generations} completions of at "
        f"most {training.max_completion_length} tokens",
        f"each of which is used for {training.num_iterations} updates" if training.num_iterations > 1 else "",
        f"on {training.world_size} processes" if training.world_size > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def facts(settings: RunSettings, models: Models) -> dict[str, str]:
    training: Any = settings.training
    beta, reference = f"{training.kl_coef:g}", " and ".join(models.teachers) or "the model as it starts"
    if training.kl_target is not None:
        beta += f" at first, adapted to {training.kl_target:g} nats per {training.kl_target_unit}"
    if training.sync_ref_model:
        reference += f", moved towards the policy every {training.ref_model_sync_steps} updates"
    needed = memory(settings, models)
    sizes = [f"{name} {in_units(size)}" for name, size in needed.items() if size]
    return {
        "model": models.name,
        "reference": reference,
        "placement": f"in the {training.kl_placement}",
        "β": beta,
        "trains": amount(training),
        "memory": f"{in_units(sum(needed.values()))} without activations: {', '.join(sizes)}",
    }


def memory(settings: RunSettings, models: Models) -> dict[str, float]:
    """Bytes of all processes together, with each model counted once; vLLM allocates its own.

    (`accelerate estimate-memory` knows one model of the hub, and no adapters, sampling or exact KL.)
    """
    args: Any = settings.training  # TRL has replaced every None that is multiplied here
    policy = settings.policy
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(policy.dtype), torch.float32)
    model = _empty(models.path, models.load_options)
    config, weights = model.config.get_text_config(), sum(p.numel() for p in model.parameters())
    others = [_empty(path, {"trust_remote_code": args.trust_remote_code}) for path in models.teachers.values()]
    reference = sum(p.numel() for each in others for p in each.parameters())
    if adapters := get_peft_config(policy):
        from peft import get_peft_model

        model = get_peft_model(model, adapters)
    elif not others:
        reference = weights
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) * kind.itemsize
    width = 4 if policy.load_in_4bit else 8 if policy.load_in_8bit else 8 * kind.itemsize
    sizes = {"policy": weights * width / 8, "gradients": trained, "AdamW": 2 * trained}
    sizes["reference"] = reference * kind.itemsize
    if not args.use_vllm:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        tokens = args.generation_batch_size * args.max_completion_length
        sizes["keys and values"] = tokens * config.num_hidden_layers * 2 * heads * head * kind.itemsize
    if args.objective.exact:
        tokens = args.per_device_train_batch_size * args.max_completion_length
        plan = make_plan(tokens, config.vocab_size, kind, paired=True, budget=args.kl_memory << 20)
        sizes["exact KL"] = (plan.tile_bytes + plan.kept_bytes) * args.world_size
    return sizes


def _empty(model: str, how: Json) -> Any:
    """A model without weights."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, **how)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=how["trust_remote_code"])
    empty.tie_weights()  # otherwise a shared head is counted twice
    return empty


def in_units(count: float) -> str:
    """MiB, or GiB from one GiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


# Sentences about a run: what is saved when it stops, and what it has left.


def how_to_continue(settings: RunSettings, folder: Path) -> str:
    """What of the run is on disk, and the command that continues it."""
    if (checkpoint := last_complete(folder)) is not None:
        again = resume_command(settings.command, folder, settings.given)
        return f"The run is saved after {in_updates(step_of(checkpoint))} in {checkpoint}. Continue with: {again}"
    more = ["--overwrite"] if results_of_a_run(folder) else []
    again = resume_command(settings.command, folder, settings.given, *more)
    return f"Nothing has been saved yet. Start again with: {again}"


def finished_message(folder: Path, updates: int) -> str:
    """What is said of a run that is finished: from where it can be made longer, and what is kept."""
    longer = "To make it longer, give a larger --max_steps with --resume"
    if not last_complete(folder):
        longer = "There is no complete checkpoint to make it longer from: --weights_only false keeps them"
    kept = ", ".join(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
    return f"The run in {folder} is finished, after {in_updates(updates)}. {longer}. Kept are {kept}."


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
    for one, other in (("student", "teacher"), ("teacher", "student")) if "overlap" in last else ():
        masses = [format_estimate(x["overlap"][f"{one}_on_{other}s"]) if x else "" for x in comparisons]
        rows.append([f"{one}'s mass on the {other}'s top {last['overlap']['k']}", *masses])
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


# The model card of a run.


def model_card(settings: RunSettings, models: Models) -> str:
    """`README.md` of a run: its base model, for the hub too, its reference and its KL."""
    base, run = models.name.partition(":")[0], settings.run
    base = SOURCE if base == EMBEDDED else base
    on_hub = base.count("/") == 1 and not Path(base).exists()
    rewards = f", reward {run.reward}" if run.reward else ""
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            *([f"base_model: {base}"] if on_hub else []),
            "tags: [klgrad, trl, grpo]",
            "---\n",
            f"# {Path(str(settings.training.output_dir)).name}\n",
            f"Trained by `klgrad {settings.command}`, on TRL's GRPOTrainer.\n",
            f"- base model: {models.name if base in models.name else f'{models.name} ({base})'}",
            f"- reference of the KL: {' and '.join(models.teachers) or 'the base model'}",
            f"- maximises: {objective(settings)}",
            *(f"- {line}" for line in filter(None, [f"gradient of the KL: {formula(settings)}", scaling(settings)])),
            f"- trained on: {run.task}{rewards}\n",
        ]
    )
