"""Distillation by TRL's own trainer, with the student, teacher, prompts and evaluation of `distill_runs.py`.

TRL's trainer samples one completion of each prompt, averages the divergence over all tokens of a batch, and uses a
batch for one update. It has no fused layers and no CUDA graphs here: its seconds are those of TRL as it is installed.
"""

from pathlib import Path
from typing import Any

from distill_runs import TrainingClock
from judge import Judge
from packed import Job, Row

BETAS = {"trl-reverse": 1.0, "trl-jsd": 0.5, "trl-forward": 0.0}
"""TRL's setting for the divergence. The first is its default, and the objective of the other arms."""
SHARED = (
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_completion_length",
    "gradient_checkpointing",
    "seed",
    "bf16",
    "use_cpu",
    "disable_dropout",
    "disable_tqdm",
)
"""Settings of a `klgrad distill` that TRL's trainer has under the same name; the others keep TRL's defaults."""


def train(job: Job, folder: Path) -> list[Row]:
    """Train one student by TRL's trainer, and return its evaluations, as `distill_runs.train` does.

    The job's flags are those of a `klgrad distill`, which is built to evaluate and never trained: before each
    evaluation it gets the student's weights.
    """
    import fused_layers
    import graph_sampling
    import shared_prompts
    from transformers import TrainerCallback

    from klgrad.training.build import build, models_of
    from klgrad.training.settings import parse

    settings = parse("distill", [*job.flags, "--output_dir", str(folder)])
    models = models_of(settings)
    judged, evaluator = build(settings, models)
    for part in (fused_layers, graph_sampling, shared_prompts):
        part.install(judged)
    judge, rows, clock = Judge(judged, evaluator, on_reference=True), [], TrainingClock()
    trainer = _trainer(job, settings, models, judged, folder)

    def evaluate(step: int) -> None:
        clock.stop()
        judged.model.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
        rows.append({"update": step, "seconds": round(clock.seconds, 2), **judge(seed=1000 + step)})
        clock.start()

    class Evaluations(TrainerCallback):
        """Evaluates after every so many updates, as often as the other arms."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % job.settings["every"] == 0:
                evaluate(state.global_step)

    trainer.add_callback(Evaluations())
    evaluate(0)
    trainer.train()
    return rows


def _trainer(job: Job, settings: Any, models: Any, judged: Any, folder: Path) -> Any:
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    chosen = {name: getattr(settings.training, name) for name in SHARED}
    args = DistillationConfig(
        str(folder / "trl"), beta=BETAS[job.settings["trainer"]], save_strategy="no", report_to="none", **chosen
    )
    prompts = judged.train_dataset.select_columns(["prompt"])
    (teacher,) = models.teachers.values()
    return DistillationTrainer(
        models.path,
        teacher,
        args,
        train_dataset=prompts,
        processing_class=judged.processing_class,
    )
