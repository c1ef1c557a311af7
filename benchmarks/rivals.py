"""Kernels of other libraries on the same inputs, each called as in its own trainer."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

Step = Callable[[], object]


def exact(h: Tensor, w: Tensor, h_ref: Tensor, w_ref: Tensor, upstream: Tensor) -> dict[str, Step]:
    """The exact reverse KL: TRL's distillation kernel, and torch over full logits."""

    def trl() -> None:
        function = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        kl, _ = function.apply(h, w, None, h_ref, w_ref, None, 1.0)
        (kl * upstream).sum().backward()

    def eager() -> None:
        log_p = torch.log_softmax((h @ w.T).float(), -1)
        with torch.no_grad():
            log_q = torch.log_softmax((h_ref @ w_ref.T).float(), -1)
        (((log_p.exp() * (log_p - log_q)).sum(-1)) * upstream).sum().backward()

    return {"TRL ChunkedDivergence (KL alone)": trl, "torch, full logits (KL alone)": eager}


def sampled(h: Tensor, w: Tensor, y: Tensor, upstream: Tensor) -> dict[str, Step]:
    """Only the log-prob of the sampled token."""

    def trl() -> Tensor:
        module = import_module("trl.kernels.chunked_logprob")
        chunk = getattr(module, "VOCAB_CHUNK_SIZE", 32768)
        return module.ChunkedLogProbFunction.apply(h, w, None, y, 1.0, chunk, None, 1.0, ())[0]

    def liger() -> Tensor:
        function = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        return -function(h, w, y, reduction="none")

    def cce(filter_eps: str | None) -> Tensor:
        function = import_module("cut_cross_entropy").linear_cross_entropy
        return -function(h, w, y, reduction="none", filter_eps=filter_eps)

    def verl_torch() -> Tensor:
        return import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()(h, w, y)[0]

    def verl_triton() -> Tensor:
        return import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy(h, w, y, 1.0, "none")[0]

    def eager() -> Tensor:
        return torch.log_softmax((h @ w.T).float(), -1).gather(-1, y[:, None])[:, 0]

    forwards = {
        "TRL ChunkedLogProb": trl,
        "Liger fused linear cross-entropy": liger,
        "cut-cross-entropy": partial(cce, "high"),
        "cut-cross-entropy, no filter": partial(cce, None),
        "verl FusedLinearForPPO": verl_torch,
        "verl LinearCrossEntropy (Triton)": verl_triton,
        "torch, full logits": eager,
    }
    return {name: partial(_step, forward, upstream) for name, forward in forwards.items()}


def _step(forward: Callable[[], Tensor], upstream: Tensor) -> None:
    (forward() * upstream).sum().backward()
