"""cuDNN's attention is avoided, or warned of, exactly where its gradients may be NaN."""

import warnings

import pytest
import torch

from klgrad.trl.contract import avoid_cudnn_attention, warn_of_cudnn_attention

HERE = torch.device("cuda")
AFFECTED = {"version": "2.13.0+cu130", "capability": (9, 0), "enabled": True}


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be another machine; return what was switched off."""
    calls = []

    def be(version, capability, enabled):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
        return calls

    return be


def test_it_is_switched_off_where_it_has_the_error(machine):
    calls = machine(**AFFECTED)
    avoid_cudnn_attention(HERE)
    assert calls == [False]


@pytest.mark.parametrize("other", [{"version": "2.10.0"}, {"capability": (8, 0)}, {"enabled": False}])
def test_it_is_left_alone_elsewhere(machine, other):
    calls = machine(**AFFECTED | other)
    avoid_cudnn_attention(HERE)
    avoid_cudnn_attention(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cudnn_attention(HERE, "sdpa", half=True)
    assert calls == []


def test_a_run_that_may_use_it_is_warned(machine):
    machine(**AFFECTED)
    with pytest.warns(UserWarning, match="enable_cudnn_sdp"):
        warn_of_cudnn_attention(HERE, "sdpa", half=True)


@pytest.mark.parametrize(("attention", "half"), [("eager", True), ("sdpa", False)])
def test_other_runs_are_not(machine, attention, half):
    machine(**AFFECTED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cudnn_attention(HERE, attention, half=half)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_gradients_of_very_negative_scores_are_finite_without_it():
    avoid_cudnn_attention(HERE)
    q, k, v = (torch.randn(2, 3, 64, 64, device=HERE, dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0  # every score is near -120
    for x in (q, k, v):
        x.requires_grad_()
    mask = torch.ones(64, 64, dtype=torch.bool, device=HERE).tril()[None, None]
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
