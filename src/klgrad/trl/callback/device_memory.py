"""How much memory of a device a measurement may use."""

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a GPU, with what torch holds unused; 0 on a CPU, where it is not known."""
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
