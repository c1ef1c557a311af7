"""Build the trainer and the evaluator from settings; models, prompts and rewards are checked before training."""

from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError
from ..models import EMBEDDED, layer_count, resolve
from ..support import Json
from ..trl.config import teachers_of
from ..trl.kl_trainer import check_prompts
from .checkpoint import RunTrainer
from .data import Data, Reward, checked_reward, data_of, has_reward, probe
from .evaluate import Evaluator, TeacherComparison
from .settings import RunSettings

DROPPED = 3
"""The default student lacks one in this many layers of its teacher."""


@dataclass(frozen=True)
class Models:
    """The policy and the reference: names as they are printed, paths and keyword arguments for `from_pretrained`.

    Of several teachers the first is the reference; `teachers` has the paths of all by name, and is empty without one.
    """

    name: str
    path: str
    load_options: Json
    reference_name: str
    reference: str
    reference_options: Json
    teachers: dict[str, str] = field(default_factory=dict[str, str])


def models_of(settings: RunSettings) -> Models:
    """Find both models, without loading their weights."""
    run, training, policy = settings.run, settings.training, settings.policy
    _check(settings)
    trusted = {"trust_remote_code": bool(training.trust_remote_code)}
    options = {**trusted, "revision": policy.model_revision}
    if settings.command == "train" and training.teacher is None:
        name = policy.model_name_or_path or EMBEDDED
        path = resolve(name, run.student_layers, **options)
        return Models(_with_layers(name, run.student_layers), path, options, name, path, options)
    teachers = teachers_of(training.teacher or EMBEDDED)
    teacher = next(iter(teachers.values()))
    name, layers = policy.model_name_or_path, run.student_layers
    if name is None:
        name, options = teacher, trusted  # `model_revision` does not apply to a teacher
        layers = layers if layers is not None else max(1, layer_count(teacher, **options) * (DROPPED - 1) // DROPPED)
    return Models(
        _with_layers(name, layers),
        resolve(name, layers, **options),
        options,
        " and ".join(teachers),
        resolve(teacher, **trusted),
        trusted,
        {known: resolve(path, **trusted) for known, path in teachers.items()},
    )


def _with_layers(name: str, layers: int | None) -> str:
    return name if layers is None else f"{name} with {layers} layers"


def _check(settings: RunSettings) -> None:
    training, policy = settings.training, settings.policy
    if policy.model_revision != "main" and policy.model_name_or_path is None:
        raise SettingError(
            "`model` with `model_revision`",
            "none",
            "name the model that has this revision; it does not apply to a teacher",
        )
    if training.use_vllm and settings.run.eval_greedy:
        raise SettingError(
            "`eval_greedy` without `use_vllm`", "both", "leave one out: the sampling of vLLM is fixed when it starts"
        )
    if settings.rewarded and not has_reward(settings.run):
        raise SettingError(
            "a reward for a dataset of prompts",
            "none",
            "give --reward package.module:function, or use klgrad distill, which needs none",
        )


def build(settings: RunSettings, models: Models) -> tuple[RunTrainer, Evaluator]:
    """Load models and data, call each reward function once, and build the trainer and the evaluator."""
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    training = settings.training
    tokenizer = AutoTokenizer.from_pretrained(
        models.path, padding_side="left", truncation_side="left", **models.load_options
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = data_of(settings.run, training.seed, conversational=tokenizer.chat_template is not None)
    check_prompts(training, len(data.train))
    rewards = [checked_reward(reward) for reward in data.rewards]
    probe(data.rewards, data.train[0])
    trained = rewards if settings.rewarded else []  # a distillation may be evaluated by rewards it is not trained on
    weights = list(training.reward_weights or [1.0] * len(rewards))
    trainer = _trainer(settings, models, tokenizer, data, trained)
    trainer.remove_callback(PrinterCallback)
    trainer.task_rewards = {reward.__name__: weight for reward, weight in zip(trained, weights, strict=False)}
    comparison = TeacherComparison(list(models.teachers)) if settings.command == "distill" else None
    greedy = settings.run.eval_greedy
    return trainer, Evaluator(data.evaluation, rewards, weights, training.seed, greedy, comparison)


def _trainer(settings: RunSettings, models: Models, tokenizer: Any, data: Data, rewards: list[Reward]) -> RunTrainer:
    from trl.trainer.utils import get_peft_config, get_quantization_config

    training, policy = settings.training, settings.policy
    asked = teachers_of(training.teacher)  # a name that was given stays: a column of the dataset may have it
    named = [path if asked.get(name, name) == name else f"{name}={path}" for name, path in models.teachers.items()]
    training.teacher = ",".join(named) or None
    how: Json = {"attn_implementation": policy.attn_implementation, "revision": policy.model_revision}
    how = {name: x for name, x in {"dtype": policy.dtype, **how}.items() if x is not None}
    declared: Any = training.model_init_kwargs or {}
    training.model_init_kwargs = how | dict(declared)
    return RunTrainer(
        models.path,
        rewards or None,
        training,
        train_dataset=data.train,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(policy),
        peft_config=get_peft_config(policy),
    )
