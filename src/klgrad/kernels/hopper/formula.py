"""The formulas of `state.py`, `Kept` and `weights.py` at each entry, for kernels in Gluon.

They have no layout and no memory, so that tests run them on a CPU with torch in place of `gl`, and compare the two.

For |d| < 1/2 the excess of the reverse KL is p d² S(d) with S(d) = (e^-d - 1 + d) / d², here by a polynomial that is
within 1.1e-7 of it, relatively; that of the forward KL is p d² (1 - (1 + d) S(d)), which needs no second polynomial.
"""

# Triton compiles these functions; they are not run as Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp(x):
    """e^x by one multiplication and one instruction; gl.exp also treats results below 1e-38."""
    scaled = x * 1.4426950408889634
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def terms(a, b):
    """The terms of a state's seven sums, in the order p, p a, q, p d, q d, reverse, forward; no entry is banned."""
    p = exp(a)
    q = exp(b)
    d = a - b
    pd = p * d
    square = pd * d
    tail = 0.04166579246520996 + d * (-0.008333181962370872 + d * (0.0013982197269797325 - d * 0.00019962186343036592))
    reverse = square * (0.5 + d * (-0.1666666716337204 + d * tail))
    forward = (square - reverse) - reverse * d
    near = gl.abs(d) < 0.5
    fall = p - q
    return p, p * a, q, pd, q * d, gl.where(near, reverse, pd - fall), gl.where(near, forward, fall - q * d)


@gluon.jit
def kept_pair(a, b, mean, tiny, limit):
    """The two numbers of `Kept.store`. With a factor of the logits, a can be above 0 by rounding."""
    a = gl.minimum(a, 0.0)
    d = a - b
    own = d >= 0
    larger = gl.where(own, a, gl.maximum(0.0 - b, tiny))
    apart = gl.where(own, d - mean, d)
    return gl.minimum(gl.maximum(larger, 0.0 - limit), limit), gl.minimum(gl.maximum(apart, 0.0 - limit), limit)


@gluon.jit
def logit_gradient(z, z_ref, hit, numbers):
    """The gradient of `weights.at_logits`, from the numbers of `weights.per_token`; `hit` marks the sampled token."""
    logsumexp, shift, alpha, w_reverse, minus_w_entropy, w_forward, w_logp = numbers
    log_p = z - logsumexp
    log_q = z_ref - (logsumexp - shift)
    delta = (z - z_ref) - shift
    inner = (alpha + minus_w_entropy * log_p) + w_reverse * delta
    return (gl.where(hit, w_logp, 0.0) - w_forward * exp(log_q)) + exp(log_p) * inner
