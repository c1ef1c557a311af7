"""Kernels of other libraries on the same inputs, each called as in its own trainer."""

import importlib.metadata
import math
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

Step = Callable[[], object]

PACKAGES = {"TRL": "trl", "Liger": "liger-kernel", "cut-cross-entropy": "cut-cross-entropy", "verl": "verl"}
PACKAGES |= {"QuACK": "quack-kernels", "torch": "torch"}
"""Which distribution has a candidate, by the first word of its name."""
SLOW = ("cut-cross-entropy", "verl")
"""Candidates that take several times as long as the others, and are left out at further shapes."""
ONE_PASS = ("QuACK", "Liger fused linear JSD", "torch")
"""Candidates that compute each logit once: they keep the logits, or compute gradients in the forward pass."""
LIGER_PRIMITIVES = {
    "Liger fused linear JSD (mean KL alone)": "jsd_loss_and_grad",
    "Liger fused linear JSD (mean alone)": "jsd_loss_and_grad",
    "Liger fused linear cross-entropy, dispatched": "fused_linear_cross_entropy",
}
"""Candidates of which Liger chooses the kernel when it runs, by the name of the choice."""
CHUNKED = "Liger chunked JSD (mean alone)"
SCALED = "Liger fused linear scaled cross-entropy"
CHECK = "LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"
"""Whether that candidate checks its targets, for which it waits for the GPU. The others do not, and neither do ours."""
os.environ.setdefault(CHECK, "0")


def library(candidate: str) -> str:
    """The name and version of the library that a candidate comes from; empty for floors and for klgrad."""
    package = PACKAGES.get(candidate.replace(",", " ").split()[0])
    if package is None:
        return ""
    try:
        made = f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
    return f"{made}, {_liger_kernels(candidate)}" if package == "liger-kernel" else made


def _liger_kernels(candidate: str) -> str:
    """What the kernels of a candidate of Liger are written in, by Liger's own choice on this machine."""
    if candidate == SCALED:
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        return "CuTe" if hopper else "torch"
    if candidate == CHUNKED:
        return "torch"
    if candidate not in LIGER_PRIMITIVES:
        return "Triton"
    import_module("liger_kernel.functional")  # declares where the choices are
    chosen: str = import_module("liger_kernel.backends").resolve_impl(LIGER_PRIMITIVES[candidate]).impl_name
    return {"nvidia-cutedsl": "CuTe", "nvidia-triton": "Triton"}.get(chosen, chosen)


def exact(h: Tensor, w: Tensor, h_ref: Tensor, w_ref: Tensor, upstream: Tensor) -> dict[str, Step]:
    """The exact reverse KL: TRL's distillation kernel, Liger's, and torch over full logits."""

    def trl() -> None:
        function = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        kl, _ = function.apply(h, w, None, h_ref, w_ref, None, 1.0)
        (kl * upstream).sum().backward()

    def liger() -> None:
        function = import_module("liger_kernel.transformers.functional").liger_fused_linear_jsd
        function(h, w, h_ref, w_ref, jsd_beta=1.0).backward()

    def eager() -> None:
        log_p = torch.log_softmax((h @ w.T).float(), -1)
        with torch.no_grad():
            log_q = torch.log_softmax((h_ref @ w_ref.T).float(), -1)
        (((log_p.exp() * (log_p - log_q)).sum(-1)) * upstream).sum().backward()

    return {
        "TRL ChunkedDivergence (KL alone)": trl,
        "Liger fused linear JSD (mean KL alone)": liger,
        "torch, full logits (KL alone)": eager,
    }


def divergences(
    name: str, h: Tensor, w: Tensor, h_ref: Tensor, w_ref: Tensor, y: Tensor, up: Tensor
) -> dict[str, Step]:
    """The reverse KL, the Jensen-Shannon divergence (half and half), or half of chi-square, which only torch has."""
    beta = 1.0 if name == "reverse" else 0.5

    def trl() -> None:
        function = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        (function.apply(h, w, None, h_ref, w_ref, None, beta)[0] * up).sum().backward()

    def liger() -> None:
        function = import_module("liger_kernel.transformers.functional").liger_fused_linear_jsd
        function(h, w, h_ref, w_ref, jsd_beta=beta).backward()

    def liger_chunked() -> None:
        # Not compiled: a compiler would be measured on a CPU that lacks one.
        loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(0.0, 1.0, beta=beta, compiled=False)
        loss(h, w, h_ref, w_ref, y).backward()

    def eager() -> None:
        log_p = torch.log_softmax((h @ w.T).float(), -1)
        with torch.no_grad():
            log_q = torch.log_softmax((h_ref @ w_ref.T).float(), -1)
        p, q = log_p.exp(), log_q.exp()
        if name == "reverse":
            found = (p * (log_p - log_q)).sum(-1)
        elif name == "chi-square":
            found = ((p - q) * (log_p - log_q).expm1()).sum(-1) / 2
        else:
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            found = (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2
        (found * up).sum().backward()

    steps: dict[str, Step] = {"torch, full logits": eager}
    if name != "chi-square":
        steps |= {"TRL ChunkedDivergence": trl, CHUNKED: liger_chunked}
        if h.is_cuda:  # Triton
            steps["Liger fused linear JSD (mean alone)"] = liger
    return steps


def sampled(h: Tensor, w: Tensor, y: Tensor, upstream: Tensor) -> dict[str, Step]:
    """Only the log-prob of the sampled token."""

    def trl() -> Tensor:
        module = import_module("trl.kernels.chunked_logprob")
        chunk = getattr(module, "VOCAB_CHUNK_SIZE", 32768)
        return module.ChunkedLogProbFunction.apply(h, w, None, y, 1.0, chunk, None, 1.0, ())[0]

    def liger() -> Tensor:
        # Always in Triton: its kernel in CuTe (LIGER_KERNEL_IMPL=cutedsl) is for compute capability 10.0 alone.
        function = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        return -function(h, w, y, reduction="none")

    def liger_dispatched() -> Tensor:
        return -import_module("liger_kernel.functional").fused_linear_cross_entropy(h, w, y, reduction="none")[0]

    def liger_scaled() -> Tensor:
        return -import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction.apply(h, w, y)

    def cce(filter_eps: str | None) -> Tensor:
        function = import_module("cut_cross_entropy").linear_cross_entropy
        return -function(h, w, y, reduction="none", filter_eps=filter_eps)

    def verl_torch() -> Tensor:
        return import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()(h, w, y)[0]

    def verl_triton() -> Tensor:
        return import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy(h, w, y, 1.0, "none")[0]

    def quack() -> Tensor:
        return -import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(h, w, y, reduction="sum")

    def eager() -> Tensor:
        return torch.log_softmax((h @ w.T).float(), -1).gather(-1, y[:, None])[:, 0]

    forwards = {
        "TRL ChunkedLogProb": trl,
        "Liger fused linear cross-entropy": liger,
        "Liger fused linear cross-entropy, dispatched": liger_dispatched,
        SCALED: liger_scaled,
        "cut-cross-entropy": partial(cce, "high"),
        "cut-cross-entropy, no filter": partial(cce, None),
        "verl FusedLinearForPPO": verl_torch,
        "verl LinearCrossEntropy (Triton)": verl_triton,
        "torch, full logits": eager,
    }
    steps = {name: partial(_step, forward, upstream) for name, forward in forwards.items()}
    # It has one weight for all tokens, so that gradients are computed in the forward pass.
    return {"QuACK linear cross-entropy (sum alone)": lambda: quack().backward(), **steps}


def _step(forward: Callable[[], Tensor], upstream: Tensor) -> None:
    (forward() * upstream).sum().backward()
