"""cuDNN's attention on Hopper GPUs may return gradients that are not a number.

From torch 2.11 on it is the default there for 16-bit attention with a mask, which every padded batch has. Its backward
pass returns NaN for the queries if the length of the batch is 64 more than a multiple of 128 and a query's scores are
all below about -88 (pytorch/pytorch issue 196678). The loss of that step is right, and the step makes every weight NaN.
"""

import warnings

import torch

FIRST_TORCH = (2, 11)
HOPPER = (9, 0)


def cudnn_gradients_may_be_nan(device: torch.device) -> bool:
    """Whether attention on this device may use cuDNN's backward pass that has the error."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return (
        device.type == "cuda"
        and version >= FIRST_TORCH
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(device) == HOPPER
    )


def avoid_cudnn_attention(device: torch.device) -> None:
    """Let this process use torch's other attention kernels where cuDNN's has the error."""
    if cudnn_gradients_may_be_nan(device):
        torch.backends.cuda.enable_cudnn_sdp(False)


def warn_of_cudnn_attention(device: torch.device, attention: str | None, *, half: bool) -> None:
    """Warn of a run that may use it: 16-bit training by torch's own attention."""
    if half and attention == "sdpa" and cudnn_gradients_may_be_nan(device):
        warnings.warn(
            f"expected attention with finite gradients; torch {torch.__version__} uses cuDNN's on this GPU, which may "
            "return NaN for padded batches (pytorch/pytorch issue 196678): call "
            "torch.backends.cuda.enable_cudnn_sdp(False) before training",
            stacklevel=3,
        )
