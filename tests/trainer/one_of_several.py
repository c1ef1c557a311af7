"""A short run as one process of one or more, on completions that depend on their place in the whole batch alone."""

import sys
from pathlib import Path

import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

from klgrad.trl import KLCallback, KLConfig, KLTrainer


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


class Stock(GRPOTrainer):
    """TRL's trainer on the same completions."""

    _generate_single_turn = Dictated._generate_single_turn


class Dropped(tiny.LeavesTheKLOut, Stock):
    """Without its KL."""


class Masked(Dropped):
    """The last process has nothing to train on in the first update, as if all its completions were cut off."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.accelerator.is_last_process and self.state.global_step == 0:
            batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
        return batch


TRAINED = ("loss", "grad_norm", "kl/reverse/k3/per_token")
WATCHED = ("kl/reverse/k3/per_token", "kl/reverse/k3/per_token/standard_error", "kl/clusters", "length/mean")
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
ZERO3 = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True, **dict.fromkeys(AUTO, "auto")}


def main(output, processes, zero3=None, stock=None, **settings):
    """A run with a declared KL, or a stock run with `KLCallback`, if it is named."""
    torch.set_num_threads(1)
    if zero3:
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(dist_backend="gloo")
        settings["deepspeed"] = ZERO3
    # Plain descent, in which a rounding error stays as small as it was.
    settings |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9}
    settings["per_device_train_batch_size"] = tiny.SETTINGS["per_device_train_batch_size"] // processes
    settings["ddp_backend"] = "gloo" if processes > 1 else None
    kinds = (globals()[stock], GRPOConfig) if stock else (Dictated, KLConfig)
    made, callback = tiny.trainer(*kinds, output, **settings), KLCallback(1, log_rollouts=output / "rollouts")
    if stock:
        made.add_callback(callback)
    made.train()
    kept = {name: tiny.logged(made, name) for name in (WATCHED if stock else TRAINED)}
    if stock:
        kept["moves"] = {None: -1.0, False: 0.0, True: 1.0}[callback.beta_moves_gradient]
    if not zero3:  # whose weights are in shards
        kept["weights"] = tiny.weights(made)
    if made.accelerator.is_main_process:
        torch.save({name: torch.as_tensor(x, dtype=torch.float64) for name, x in kept.items()}, output / "end.pt")
    if processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def from_arguments(output, processes, model, *settings):
    given = {name: int(x) if x.isdigit() else x for name, _, x in (pair.partition("=") for pair in settings)}
    beta = {"beta": 0.3 * (given["stock"] != "Stock")} if "stock" in given else {"kl_coef": 0.3}
    main(Path(output), int(processes), model=model, **beta, **given)


if __name__ == "__main__":
    from_arguments(*sys.argv[1:])
