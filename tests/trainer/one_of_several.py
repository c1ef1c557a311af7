"""A short run as one process of one or more, on completions that depend on their place in the whole batch alone."""

import sys
from pathlib import Path

import tiny
import torch

from klgrad.trl import KLConfig, KLTrainer


class Dictated(KLTrainer):
    """Completions are dictated, so that any number of processes gets the same ones."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        rows = len(prompt_ids)
        first = self.accelerator.process_index * rows + 100 * self.state.global_step
        return [dictated(first + row) for row in range(rows)], None


def dictated(place):
    random = torch.Generator().manual_seed(place)
    length = int(torch.randint(2, 8, (), generator=random))
    return [*torch.randint(2, 32, (length,), generator=random).tolist(), 1]


ZERO3 = {
    "zero_optimization": {"stage": 3},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}


def main(output, processes, zero3=None, **settings):
    torch.set_num_threads(1)
    if zero3:
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(dist_backend="gloo")
        settings["deepspeed"] = ZERO3
    each = tiny.SETTINGS["per_device_train_batch_size"] // processes
    # Plain descent, in which a rounding error stays as small as it was.
    plain = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9}
    backend = "gloo" if processes > 1 else None
    made = tiny.trained(
        Dictated, KLConfig, output, per_device_train_batch_size=each, ddp_backend=backend, **plain, **settings
    )
    kept = {name: tiny.logged(made, name) for name in ("loss", "grad_norm", "kl/reverse/k3/per_token")}
    if not zero3:  # whose weights are in shards
        kept["weights"] = tiny.weights(made)
    if made.accelerator.is_main_process:
        torch.save({name: torch.as_tensor(x, dtype=torch.float64) for name, x in kept.items()}, output / "end.pt")
    if processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def from_arguments(output, processes, model, *settings):
    given = dict(pair.split("=") for pair in settings)
    if "num_generations" in given:
        given["num_generations"] = int(given["num_generations"])
    main(Path(output), int(processes), model=model, kl_coef=0.3, **given)


if __name__ == "__main__":
    from_arguments(*sys.argv[1:])
