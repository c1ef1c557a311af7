"""A short stock run with `KLCallback`, as one process of one or more, on the completions of `one_of_several`."""

import sys
from pathlib import Path

import tiny
import torch
from one_of_several import Dictated
from trl import GRPOConfig, GRPOTrainer

from klgrad.trl import KLCallback


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


def main(output, processes, model, beta, masked):
    torch.set_num_threads(1)
    each = tiny.SETTINGS["per_device_train_batch_size"] // processes
    plain = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9, "num_generations": 8}
    backend = "gloo" if processes > 1 else None
    kind = Masked if masked else Dropped if beta else Stock
    how = {"per_device_train_batch_size": each, "ddp_backend": backend, "gradient_accumulation_steps": 2, "beta": beta}
    made = tiny.trainer(kind, GRPOConfig, output, model=model, **how, **plain)
    callback = KLCallback(1, log_rollouts=output / "rollouts")
    made.add_callback(callback)
    made.train()
    names = ("kl/reverse/k3/per_token", "kl/reverse/k3/per_token/standard_error", "kl/clusters", "length/mean")
    kept = {name: tiny.logged(made, name) for name in names}
    if made.accelerator.is_main_process:
        found = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in kept.items()}
        found["moves"] = torch.tensor({None: -1.0, False: 0.0, True: 1.0}[callback.beta_moves_gradient])
        torch.save({**found, "weights": tiny.weights(made)}, output / "end.pt")
    if processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), "masked" in sys.argv)
