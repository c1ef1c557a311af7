"""Scores of completions: exact KLs by a forward pass that computes them, and groups of completions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, get_args

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.divergences import Divergence
from ..core.families import Direction
from ..core.importance import token_ratio
from ..core.rollout import Rollout
from ..errors import MeaningError, SettingError
from ..integrations import refuse_if
from ..kernels import (
    Head,
    TokenStatistics,
    TopEntries,
    check_head,
    head_kl,
    lumped_kl,
    sampled_tail_kl,
    token_statistics,
    top_entries,
)
from ..support import Json, Model
from . import compat
from .compat import REF_LOGP, Batch, CompletionRows, ForwardPass, Pass, base_of
from .config import KLConfig, TRLObjective, teachers_of

# All processes' completions of one step, so that baselines and reports are those of the whole batch.


def gather_rows(accelerator: Accelerator, local: dict[str, Tensor | None]) -> tuple[Json, slice]:
    """Gather tensors from all processes, padded to one length; also return which rows are this process'.

    Those keep their gradient.
    """
    rows = len(next(x for x in local.values() if x is not None))
    if accelerator.num_processes == 1:
        return dict(local), slice(0, rows)
    rows_here = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    return {name: None if x is None else _gathered(accelerator, x, rows_here) for name, x in local.items()}, rows_here


def _gathered(accelerator: Any, x: Tensor, own: slice) -> Tensor:
    if x.ndim == 1:
        return accelerator.gather(x)
    total = accelerator.gather(accelerator.pad_across_processes(x.detach().contiguous(), dim=1)).clone()
    if not x.requires_grad:
        return total
    mine = torch.nn.functional.pad(x, (0, total.shape[1] - x.shape[1]))
    return torch.cat([total[: own.start], mine, total[own.stop :]])


# Groups: the completions of one prompt, by `compat.prompt_keys`.


def merge_lone_rows(group: Tensor) -> Tensor:
    """(B,) groups of at least two: completions that are alone in their group share one.

    A baseline over completions of other prompts is as unbiased as one over the same prompt's, because it does not
    depend on the completion either; it only reduces the variance less.
    """
    values, index, counts = group.unique(return_inverse=True, return_counts=True)
    alone = counts[index] == 1
    if not bool(alone.any()) or len(values) == 1:
        return group
    home = group[alone][0] if int(alone.sum()) > 1 else values[counts.argmax()]
    return torch.where(alone, home, group)


def shuffle_groups(batch: Batch) -> Batch:
    """The batch with its groups in a random order and the rows of each group adjacent.

    TRL shuffles single rows; then the completions of a prompt would fall into different micro-batches.
    """
    _, index = batch["group"].unique(return_inverse=True)
    place = torch.randperm(int(index.max()) + 1)[index.cpu()]
    order = place.argsort(stable=True)

    def permuted(x: Tensor | list[object] | None) -> Tensor | list[object] | None:
        if x is None or (isinstance(x, Tensor) and x.ndim == 0):
            return x
        return x[order.to(x.device)] if isinstance(x, Tensor) else [x[i] for i in order.tolist()]

    return {name: permuted(x) for name, x in batch.items()}


# The divergence over some of the entries.


def with_top_k_kl(
    statistics: TokenStatistics, best: TopEntries, objective: TRLObjective, mask: Tensor, behavior_logp: Tensor | None
) -> TokenStatistics:
    """Add the declared divergence, over the likeliest entries and a tail, to the policy's statistics.

    `best` has the entries with the teacher's log-probs, `statistics` the policy's log-probs there. `behavior_logp` are
    (B, T) log-probs of what sampled the tokens; None if the policy did.
    """
    term = objective.term
    assert term is not None  # a loss of the zoo has no top k
    assert statistics.entries_logp is not None  # the question named them
    if objective.tail == "sampled":
        ratio = _tail_ratio(objective, Rollout(statistics.logp, best.token_logp, mask, behavior_logp=behavior_logp))
        at_token = statistics.logp, best.token_logp, best.has_token
        kl = sampled_tail_kl(statistics.entries_logp, best.logp, *at_token, ratio=ratio, divergence=term.generator)
    else:
        kl = (lumped_kl if objective.tail == "lump" else head_kl)(statistics.entries_logp, best.logp, term.generator)
    field = f"{term.divergence}_kl" if term.divergence in get_args(Direction) else "divergence"
    return statistics._replace(ref_logp=best.token_logp, **{field: kl})


def _tail_ratio(objective: TRLObjective, rollout: Rollout) -> Tensor | None:
    """(B, T) the ratio of the sampled token alone; None if it needs none.

    The term's own ratio covers the tokens before it (or, for a sequence ratio, the token too). A term without a ratio
    is right for the entries, which are summed over, but the sampled tail still needs its ratio.
    """
    sampler = objective.term.weighting if objective.term is not None else None
    if rollout.behavior_logp is None or (sampler is not None and sampler.ratio == "sequence"):
        return None
    ratio = token_ratio(rollout)
    return ratio if objective.bound is None else objective.bound(ratio)


# Exact statistics inside a model's own forward, where DDP, FSDP and DeepSpeed expect its parameters to be used.


@dataclass(frozen=True, eq=False)
class ReferencePass:
    """A reference at the tokens of a batch: (B, keep, H) hidden states, its head, and the weight of its divergence.

    The weight is (B, 1) if it differs between rows.
    """

    hidden: Tensor
    head: Head
    weight: Tensor | float = 1.0


@dataclass(frozen=True, eq=False)
class StatisticsRequest:
    """What a model returns instead of logits: hidden states, or statistics of its last `keep` tokens.

    Attributes:
        targets: (B, keep) tokens, or None for the hidden states that predict them.
        mask: (B, keep) 1 for live tokens.
        references: to which divergences are computed; sums of several are weighted.
        vocabulary: how many entries both models share, where one of them pads its head; None for all.
        divergence: a divergence to compute beside the KLs.
        budget: bytes for tiles of logits.
        float32: project in float32, even under autocast.
        top_k: how many of the likeliest entries are wanted, with both models' log-probs, instead of divergences.
        top_k_of: whose entries, the `teacher`'s (the reference's) or the `student`'s.
    """

    keep: int
    temperature: float
    targets: Tensor | None = None
    mask: Tensor | None = None
    references: tuple[ReferencePass, ...] = ()
    vocabulary: int | None = None
    divergence: Divergence | None = None
    budget: int | None = None
    float32: bool = False
    top_k: int | None = None
    top_k_of: str = "teacher"


Statistics = dict[str, Any]
"""`hidden` states; or the fields of `TokenStatistics`, with the `ids` and the `ref_entries_logp` of a top k."""


def add_statistics_forward(model: Model) -> None:
    """Let the model return `Statistics` where it is called with a `question`; else its forward is unchanged."""
    forward = model.forward

    @wraps(forward)
    def answering(*args: object, question: StatisticsRequest | None = None, **kwargs: object) -> object:
        if question is None:
            return forward(*args, **kwargs)
        last = model.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        hidden = last[:, -question.keep - 1 : -1]
        if question.targets is None:
            return {"hidden": hidden}
        with torch.autocast(hidden.device.type, enabled=False) if question.float32 else nullcontext():
            return statistics_of(hidden, head_of(model, question.temperature, question.vocabulary), question)

    model.forward = answering


def statistics_of(hidden: Tensor, head: Head, question: StatisticsRequest) -> Statistics:
    """What is asked of the policy, from its (B, keep, H) hidden states."""
    how: Json = {"mask": question.mask, "budget": question.budget}
    refs, targets = question.references, question.targets
    assert targets is not None  # else hidden states are asked for
    if question.top_k is not None:
        [ref] = refs
        of = (ref.hidden, ref.head) if question.top_k_of == "teacher" else (hidden.detach(), head)
        ids = top_entries(*of, targets, question.top_k, **how).ids
        student = token_statistics(hidden, head, targets, entries=ids, **how)
        with torch.no_grad():
            teacher = token_statistics(ref.hidden, ref.head, targets, entries=ids, **how)
        named = student._replace(ref_logp=teacher.logp)._asdict()
        return {**named, "ids": ids, "ref_entries_logp": teacher.entries_logp}
    if refs:
        how |= {"ref_weights": [ref.weight for ref in refs], "divergence": question.divergence}
        how |= {"ref_hidden": [ref.hidden for ref in refs], "ref_head": [ref.head for ref in refs]}
    return token_statistics(hidden, head, targets, **how)._asdict()


@contextmanager
def statistics_forward(model: Model) -> Iterator[None]:
    """`add_statistics_forward` while the context lasts."""
    before, was_own = model.forward, "forward" in vars(model)
    add_statistics_forward(model)
    try:
        yield
    finally:
        if was_own:
            model.forward = before
        else:
            del model.forward


def head_of(model: Model, temperature: float, vocabulary: int | None) -> Head:
    """The model's head: whole, even where DeepSpeed has split its weights, and cut to `vocabulary` entries."""
    output = model.get_output_embeddings()
    bias = getattr(output, "bias", None)
    with compat.gathered(output.weight, bias):
        head = Head.of(model, temperature=temperature)
        if hasattr(output.weight, "ds_id"):  # gathered only for now: the backward pass needs a copy
            head = head.clone()
    if vocabulary is None or vocabulary == head.vocabulary:
        return head
    return replace(head, weight=head.weight[:vocabulary], bias=None if head.bias is None else head.bias[:vocabulary])


def shared_vocabulary(models: list[Model]) -> int | None:
    """How many entries all heads have, where one is padded beyond another; None where they agree."""
    sizes = {model.config.get_text_config().vocab_size for model in models}
    return min(sizes) if len(sizes) > 1 else None


# A comparison, before the first use, of the head that is read from a model with the model's own logits.
#
# `Head.of` reads what follows the last hidden state (scale, soft cap, bias) from the names of a model's fields. A model
# that names them differently would get other log-probs, in the KL and in the policy loss, without an error.

TOKENS = 64
"""Tokens that are compared, the last ones of one completion: their logits fit into memory beside any model."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def some_tokens(batch: Batch) -> Tensor:
    """(1, n) the last live tokens of the first completion, which have no image."""
    ids = batch["completion_ids"][0][batch["completion_mask"][0].bool()][-TOKENS:]
    return (ids if len(ids) else batch["completion_ids"][0][-1:])[None]


@torch.no_grad()
def compare_head(accelerator: Accelerator, model: Model, ids: Tensor) -> None:
    """Raise `KernelInputError` if the head differs from the model's own logits by more than rounding.

    The model is called as training calls it, on all processes at once, and its head is read within that call: there
    DDP, FSDP and DeepSpeed have its parameters whole.
    """
    seen: list[tuple[Tensor, Head]] = []
    unwrapped = accelerator.unwrap_model(model)
    base = base_of(unwrapped)
    hook = base.base_model.register_forward_hook(
        lambda _, args, output: seen.append((output[0], head_of(unwrapped, 1.0, None).clone()))
    )
    try:
        with without_dropout(model), accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        hook.remove()
    if len(seen) != 1:
        raise MeaningError(
            "a model that calls its base model once for its logits",
            f"{len(seen)} calls by {type(base).__name__}",
            "use a sampled estimator, or trl.DistillationTrainer, and report the model",
        )
    hidden, head = seen[0]
    # accelerate returns the results of autocast as float32, but they were rounded.
    mixed = HALF.get(str(accelerator.mixed_precision), torch.float32)
    kinds: list[torch.dtype] = [logits.dtype, head.weight.dtype, mixed]
    check_head(head, hidden, logits.to(max(kinds, key=lambda kind: torch.finfo(kind).eps)))


@contextmanager
def without_dropout(model: Model) -> Iterator[None]:
    """Two passes of one model differ by dropout; every module gets its mode back afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


# Forward passes of the policy and of its reference over completions.


def ask(accelerator: Accelerator, model: Model, batch: CompletionRows, question: StatisticsRequest) -> Statistics:
    """Call a model as training calls it."""
    with accelerator.autocast():
        return model(input_ids=batch.ids, attention_mask=batch.attention, question=question)


class Scorer:
    """Log-probs and exact KLs of completions, as the objective needs them; `others` are further references.

    An exact objective prepares all models to return statistics.
    """

    def __init__(
        self, trainer: GRPOTrainer, args: KLConfig, objective: TRLObjective, others: Sequence[Model] = ()
    ) -> None:
        self._trainer, self._args, self._objective = trainer, args, objective
        self._others = list(others)
        self._teachers = list(teachers_of(args.teacher))
        self.vocabulary = shared_vocabulary(self._bases())
        self._heads_compared = False
        if objective.exact:
            self.enable_exact()

    def enable_exact(self) -> None:
        """Prepare both models for `exact` and `top_k`; done already for an exact objective."""
        for model in self._bases():
            add_statistics_forward(model)

    def _bases(self) -> list[Model]:
        return [base_of(self._trainer.accelerator.unwrap_model(each)) for each in self._models()]

    def _models(self) -> list[Model]:
        trainer = self._trainer
        return [each for each in (trainer.model, trainer.ref_model, *self._others) if each is not None]

    def groups(self, batch: Batch) -> Tensor:
        """(B,) a number for the prompt of each completion, the same on every process and in every batch."""
        return compat.prompt_keys(batch)

    # One model

    def log_probs(self, model: Model, batch: Batch) -> Tensor:
        """(B, T) log-probs by one of the models, without gradient, in batches that fit into memory."""
        with torch.no_grad():
            size = self._args.per_device_train_batch_size
            return compat.completion_log_probs(self._trainer, model, batch, batch_size=size)[0]

    def question(self, batch: CompletionRows) -> StatisticsRequest:
        return StatisticsRequest(
            batch.keep,
            self._trainer.temperature,
            batch.targets,
            batch.mask,
            vocabulary=self.vocabulary,
            budget=self._args.kl_memory << 20,
            float32=self._args.cast_lm_head_to_fp32,
        )

    # Policy and references

    def add_teachers(self, batch: Batch, rows: list[Json]) -> None:
        """Store which teacher each row of the dataset names, and the prompt that it shows to it."""
        if (column := self._args.teacher_column) is not None:
            names: list[Any] = [row.get(column) for row in rows]
            for name in names:
                if name not in self._teachers:
                    raise SettingError(
                        f"one of the teachers ({', '.join(self._teachers)}) in the column {column!r}",
                        repr(name),
                        "name it by `teacher`, as in teacher='math=PATH,code=PATH'",
                    )
            numbers = list(map(self._teachers.index, names))
            batch["teacher"] = torch.tensor(numbers, device=self._trainer.accelerator.device)
        if (column := self._args.teacher_prompt) is not None:
            for row in rows:
                if not row.get(column):
                    raise SettingError(
                        f"a prompt for the teacher in the column {column!r} of every row",
                        f"a row with the columns {', '.join(row)}",
                        "add it, or leave `teacher_prompt` out",
                    )
            compat.keep_teacher_prompts(batch, self._trainer, [row[column] for row in rows])

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """(B, T) log-probs by the reference, or by each row's teacher, which may see another prompt."""
        logps = [self.log_probs(ref, compat.teacher_view(batch)) for ref in self.each_reference()]
        teacher = batch.get("teacher")
        return logps[0] if teacher is None else torch.stack(logps)[teacher, range(len(teacher))]

    def each_reference(self) -> Iterator[Model]:
        """The references, one after the other; each is in place until the next is asked for."""
        with compat.reference_model(self._trainer) as ref:
            yield ref
        yield from self._others

    @torch.no_grad()
    def references(self, batch: Batch) -> tuple[ReferencePass, ...]:
        """The references at the tokens of a batch. Those that the rows name see their rows alone."""
        completions, accelerator = CompletionRows.of(compat.teacher_view(batch)), self._trainer.accelerator
        passes: list[ReferencePass] = []
        for i, ref in enumerate(self.each_reference()):
            asked, rows = completions, None
            weight = self._args.teacher_weights[i] if self._args.teacher_weights else 1 / (1 + len(self._others))
            if "teacher" in batch:
                named = batch["teacher"] == i
                weight, rows = named.float()[:, None], named.nonzero()[:, 0]
                rows = rows if len(rows) else rows.new_zeros(1)  # every process calls every model
                asked = completions.of_rows(rows)
            question = StatisticsRequest(completions.keep, self._trainer.temperature)
            hidden: Tensor = ask(accelerator, ref, asked, question)["hidden"]
            head = head_of(accelerator.unwrap_model(ref), self._trainer.temperature, self.vocabulary)
            if rows is not None:
                hidden = hidden.new_zeros(len(completions.ids), *hidden.shape[1:]).index_copy_(0, rows, hidden)
            passes.append(ReferencePass(hidden, head, weight))
        return tuple(passes)

    def exact(self, model: Model, batch: Batch) -> TokenStatistics:
        """Log-probs, exact divergences to the reference, and the entropy of completions; no logits are stored."""
        given, term = CompletionRows.of(batch), self._objective.term
        is_other = term is not None and term.divergence not in get_args(Direction)
        question = replace(
            self.question(given),
            references=self.references(batch),
            divergence=term.generator if is_other and term is not None else None,
        )
        return _statistics(ask(self._trainer.accelerator, model, given, question))

    def top_k(self, model: Model, batch: Batch, k: int, of: str) -> tuple[TokenStatistics, TopEntries]:
        """Log-probs and entropy of the policy, and both models' log-probs at the k likeliest entries of one of them."""
        completions = CompletionRows.of(batch)
        question = replace(self.question(completions), references=self.references(batch), top_k=k, top_k_of=of)
        answer = ask(self._trainer.accelerator, model, completions, question)
        has_token = (answer["ids"] == completions.targets[..., None]).any(-1)
        return _statistics(answer), TopEntries(answer["ids"], answer["ref_entries_logp"], answer["ref_logp"], has_token)

    def forward(self, model: Model, batch: Batch, own: Pass) -> ForwardPass:
        """The policy's pass over a batch, with its gradient: TRL's own, or one with exact KLs in its place."""
        if not self._objective.exact:
            return ForwardPass(*own())
        refuse_images(batch.get("pixel_values") is not None, "kl_estimator='exact'")
        if not self._heads_compared:  # with adapters the reference has the policy's head
            self._heads_compared = True
            for each in (model, *self._models()[1:]):
                compare_head(self._trainer.accelerator, each, some_tokens(batch))
        if self._objective.top_k is None:
            statistics = self.exact(model, batch)
        else:
            statistics, best = self.top_k(model, batch, self._objective.top_k, self._objective.top_k_of)
            behavior = self._behavior(statistics.logp.detach(), batch)
            statistics = with_top_k_kl(statistics, best, self._objective, batch["completion_mask"], behavior)
        return ForwardPass(statistics.logp, statistics.entropy, None, statistics)

    def rollout(self, passed: ForwardPass, batch: Batch, group: Tensor) -> tuple[Rollout, slice]:
        """All processes' completions of a step, and which of the rows carry a gradient in this process."""
        exact = passed.exact
        local = {
            "logp": passed.logp,
            "ref_logp": batch[REF_LOGP] if exact is None else exact.ref_logp,
            "mask": compat.sampled_tokens(batch),
            "behavior_logp": self._behavior(passed.logp.detach(), batch),
            "token_reverse_kl": None if exact is None else exact.reverse_kl,
            "token_forward_kl": None if exact is None else exact.forward_kl,
            "token_divergence": None if exact is None else exact.divergence,
        }
        tensors, own = gather_rows(self._trainer.accelerator, local)
        tensors["mask"] = tensors["mask"].bool()
        return Rollout(**tensors, group=merge_lone_rows(group) if self._objective.needs_groups else None), own

    def sampled_rollout(self, sampled: compat.Sampled) -> Rollout:
        """All processes' completions that were just sampled."""
        refuse_images(sampled.images is not None, "kl_placement='reward'")
        batch = compat.padded(self._trainer, sampled.prompt_ids, sampled.completion_ids)
        mask = batch["completion_mask"]
        if sampled.tool_mask is not None:  # the policy did not sample what a tool returned
            mask = mask * compat.padded_rows(self._trainer, sampled.tool_mask, "right", 0)
        own = self.log_probs(self._trainer.model, batch)
        with compat.reference_model(self._trainer) as ref:
            other = self.log_probs(ref, batch)
        local: dict[str, Tensor | None] = {"logp": own, "ref_logp": other, "mask": mask, "group": self.groups(batch)}
        return Rollout(**gather_rows(self._trainer.accelerator, local)[0])

    def _behavior(self, logp: Tensor, batch: Batch) -> Tensor | None:
        """(B, T) log-probs of the sampler; `logp`, the policy's own, if it sampled and the term has weights."""
        sampler = compat.sampler_log_probs(batch, logp)
        return logp if sampler is None and self._objective.is_weighted else sampler


def refuse_images(has_any: bool, where: str) -> None:
    """Raise `MeaningError` for images: without its image, a completion would get other log-probs."""
    remedy = "use a sampled estimator with kl_placement='loss'"
    refuse_if(has_any, "prompts of text", f"images, with {where}", remedy)


def _statistics(answer: Statistics) -> TokenStatistics:
    return TokenStatistics(*(answer[name] for name in TokenStatistics._fields))
