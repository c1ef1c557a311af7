"""The model that says what it is told, read by TRL's own log-prob code; and the precision of that code."""

import pytest
import torch
from tolerances import EXACT, SINGLE

from klgrad.frameworks import FRAMEWORKS
from klgrad.frameworks.trl_stage import build, completion, in_float64, prompt, with_given_log_probs

pytestmark = [
    pytest.mark.skipif(FRAMEWORKS["trl"].installed is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own affairs
    pytest.mark.slow,
]


@pytest.mark.parametrize("rows_at_once", [1, 3, 13])
def test_trl_reads_off_the_model_what_it_was_told(rows_at_once):
    """Thirteen rows, so that prompts are of two lengths and padded; chunks of any size; the gradient is the table's."""
    from trl.kernels import chunked_logprob

    trainer = build("grpo", 2, lambda **_: [])
    table = -torch.rand(13, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add(0.05)
    lengths = [1 + row % 3 for row in range(13)]
    with_given_log_probs(trainer.model).logp = table.requires_grad_()
    tokens = trainer.processing_class([prompt(row) for row in range(13)], padding=True, padding_side="left")
    completions = [completion(n, ended=True) + [0] * (3 - n) for n in lengths]
    mask = torch.tensor([[1] * n + [0] * (3 - n) for n in lengths])
    ids = torch.cat([torch.tensor(tokens["input_ids"]), torch.tensor(completions)], 1)
    attended = torch.cat([torch.tensor(tokens["attention_mask"]), mask], 1)
    with in_float64(chunked_logprob):
        found, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attended, 3, batch_size=rows_at_once
        )
        (gradient,) = torch.autograd.grad((found * torch.arange(1.0, 40.0).view(13, 3)).sum(), table)
    EXACT.check(found, table * mask)
    EXACT.check(gradient, torch.arange(1.0, 40.0).view(13, 3) * mask)


def test_trls_own_head_is_float32_and_widening_leaves_no_trace():
    from trl.kernels import chunked_logprob

    head = chunked_logprob.ChunkedLogProbFunction.apply
    hidden = torch.tensor([[0.1, 0.7, -0.3]]).double()
    arguments = (hidden, torch.eye(3).double(), None, torch.tensor([1]), 1.0, 8)
    with in_float64(chunked_logprob):
        wide = head(*arguments)[0]
    narrow = head(*arguments)[0]
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    EXACT.check(wide, torch.log_softmax(hidden, -1)[:, 1])
    SINGLE.check(narrow, torch.log_softmax(hidden, -1)[:, 1])
    assert torch.get_default_dtype() == torch.float32
    assert hidden.float().dtype == torch.float32
    assert chunked_logprob.torch is torch
