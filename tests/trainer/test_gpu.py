"""On a CUDA device, where there is one: a training step is the step that the CPU takes."""

import pytest
import tiny
import torch
from tolerances import GPU_STEP

from klgrad.trl import KLConfig, KLTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def one_step(path, **settings):
    """With plain gradient descent, because Adam divides by gradients that may be nothing but rounding errors."""
    trainer = tiny.trainer(
        KLTrainer, KLConfig, path, kl_coef=0.3, max_steps=1, learning_rate=0.1, optim="sgd", **settings
    )
    tiny.move_reference(trainer)
    # Devices draw other random numbers from the same seed, so completions are given.
    said = lambda prompt, n: [3 + (sum(prompt) + 5 * n) % 20, 2 + n % 7, 1][: 2 + n % 2]
    trainer._generate_single_turn = lambda prompts, *_, **__: ([said(x, n) for n, x in enumerate(prompts)], None)
    start = tiny.weights(trainer).cpu().clone()
    trainer.train()
    return trainer, tiny.weights(trainer).cpu() - start


@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_a_step_is_that_of_the_cpu(estimator, tmp_path):
    there, moved = one_step(tmp_path / "cuda", kl_estimator=estimator, use_cpu=False)
    here, expected = one_step(tmp_path / "cpu", kl_estimator=estimator)
    assert there.model.device.type == "cuda"
    for name in ("loss", "grad_norm", "kl/reverse/k3/per_token"):
        GPU_STEP.check(torch.tensor(tiny.logged(there, name)), torch.tensor(tiny.logged(here, name)))
    assert float(expected.norm()) > 1e-3
    GPU_STEP.check_vector(moved, expected)
