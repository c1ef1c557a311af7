"""Log-probs, both KLs, entropy and divergences: values and gradients against plain torch over full float64 logits."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from kernels import cases
from kernels.cases import GENERATORS, agree, check_again, check_gradients, compare, compare_gradients, keeping, make
from oracle import kl_gradients
from tolerances import BFLOAT16, EXACT, SINGLE
from torch.utils.checkpoint import checkpoint

from klgrad import ImportanceWeighting, KLTerm
from klgrad.core.divergences import jensen_shannon
from klgrad.enumeration import autoregressive, every_group, target_gradients
from klgrad.errors import KernelInputError
from klgrad.kernels import Head, from_logits, fused_statistics, tiling, token_statistics

SETTINGS = {
    "plain": {},
    "policy alone": {"paired": False, "bias": True},
    "bias": {"bias": True},
    "reference's bias": {"ref_bias": True},
    "temperature": {"policy": {"temperature": 0.7}, "ref": {"temperature": 0.7}},
    "soft-cap": {"bias": True, "policy": {"softcap": 2.0}},
    "reference's soft-cap": {"ref": {"softcap": 1.5}},
    "scale": {"policy": {"scale": 0.3}, "ref": {"scale": 1.7}},
    "all": {
        "bias": True,
        "ref_bias": True,
        "policy": {"temperature": 1.4, "softcap": 3.0, "scale": 1.6},
        "ref": {"temperature": 0.8, "softcap": 2.0, "scale": 0.7},
    },
}
KEPT = (0, 30, "fast", "lean")


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("small_tiles")
def test_every_transform_however_much_is_kept(setting, kept):
    case = make(**SETTINGS[setting])
    agree(case, EXACT, **keeping(case, kept))


@pytest.mark.parametrize("tiles", ["one tile", "many tiles"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("shape", "vocabulary", "size", "ref_size"),
    [((1,), 2, 4, 4), ((1,), 1025, 64, 256), ((2, 3), 129, 8, 5), ((2, 1, 4), 40, 6, 9), ((11,), 37, 1, 3)],
    ids=str,
)
def test_odd_shapes(shape, vocabulary, size, ref_size, seed, tiles, request):
    if tiles == "many tiles":
        request.getfixturevalue("small_tiles")
    agree(make(shape, vocabulary, size, ref_size, seed=seed), EXACT)


@pytest.mark.parametrize("size", [64, 1024, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hidden_sizes_and_dtypes(size, dtype):
    agree(make((3,), 300, size, 64, dtype=dtype, bias=True), SINGLE, cases.GRADIENT[dtype])


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_half_precision_over_many_tiles(dtype, kept):
    """Kept logits are float16; sums over tiles and chunks are float32."""
    case = make(dtype=dtype, bias=True, policy={"softcap": 4.0})
    agree(case, SINGLE, BFLOAT16, **keeping(case, kept))


MIXED = {
    "float32 head": lambda case: replace(case, head=case.to(torch.float32).head),
    "float32 hidden": lambda case: replace(case, hidden=case.to(torch.float32).hidden),
    "float32 policy": lambda case: replace(case, hidden=case.hidden.float(), head=case.to(torch.float32).head),
    "float32 bias": lambda case: replace(case, head=replace(case.head, bias=case.head.bias.float())),
    "float32 reference": lambda case: replace(
        case, ref_hidden=case.ref_hidden.float(), ref_head=case.to(torch.float32).ref_head
    ),
    "float64 hidden": lambda case: replace(case, hidden=case.to(torch.float64).hidden),
}


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.usefixtures("small_tiles")
def test_mixed_dtypes(kind):
    case = MIXED[kind](make(dtype=torch.bfloat16, bias=True))
    agree(case, SINGLE, BFLOAT16)
    gradients = torch.autograd.grad(cases.weighted_sum(case.statistics()), case.leaves)
    assert [g.dtype for g in gradients] == [x.dtype for x in case.leaves]


def test_entries_may_repeat_and_may_be_the_target():
    case = make()
    agree(replace(case, entries=torch.stack([case.targets, case.targets, case.entries[:, 0]], 1)), EXACT)


@pytest.mark.usefixtures("small_tiles")
def test_non_contiguous_inputs():
    turned, every_other = (lambda x: x.T.contiguous().T), (lambda x: torch.stack([x, x], 1)[:, 0])
    case = make(bias=True)
    strided = replace(
        case,
        hidden=turned(case.hidden),
        head=Head(turned(case.head.weight), every_other(case.head.bias)),
        targets=every_other(case.targets),
        ref_hidden=turned(case.ref_hidden),
        entries=turned(case.entries),
    )
    assert not any(x.is_contiguous() for x in (*strided.leaves, strided.targets, strided.ref_hidden, strided.entries))
    agree(strided, EXACT)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_only_the_required_gradients_are_computed(wanted):
    case = make(bias=True)
    whole = torch.autograd.grad(cases.weighted_sum(case.require_grad().statistics()), case.leaves)
    fewer = make(bias=True)
    leaves = [fewer.leaves[i].requires_grad_() for i in wanted]
    cases.weighted_sum(fewer.statistics()).backward()
    for i, leaf in zip(wanted, leaves, strict=True):
        assert torch.equal(leaf.grad, whole[i])
    assert sum(x.grad is not None for x in fewer.leaves) == len(wanted)


@pytest.mark.parametrize("name", ["logp", "entropy", "reverse_kl", "forward_kl", "entries_logp"])
def test_each_output_alone(name):
    check_gradients(make(bias=True), EXACT, name)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.usefixtures("small_tiles")
def test_a_second_backward_pass_gives_the_same_gradient(kept):
    case = make(bias=True).require_grad()
    check_again(cases.weighted_sum(case.statistics(**keeping(case, kept))), case, EXACT)


def test_results_may_be_changed_in_place():
    case, spared = make().require_grad(), make().require_grad()
    changed, kept = case.statistics(), spared.statistics()
    loss = cases.weighted_sum(changed)
    for name in ("reverse_kl", "forward_kl", "entropy"):
        getattr(changed, name).data.zero_()
    compare_gradients(loss, case.leaves, cases.weighted_sum(kept), spared.leaves, EXACT)


def test_a_second_derivative_is_refused_not_wrong():
    case = make().require_grad()
    z = torch.randn(2, 5, requires_grad=True)
    of_logits = from_logits(z, torch.tensor([0, 1]), torch.zeros(2, 5)).reverse_kl.sum()
    for total, leaf in ((cases.weighted_sum(case.statistics()), case.hidden), (of_logits, z)):
        with pytest.raises(KernelInputError, match="first derivatives"):
            torch.autograd.grad(total, leaf, create_graph=True)


def test_the_reference_gets_no_gradient():
    case = make().require_grad()
    for x in (case.ref_hidden, case.ref_head.weight):
        x.requires_grad_()
    found = case.statistics()
    assert not found.ref_logp.requires_grad
    cases.weighted_sum(found).backward()
    assert case.ref_hidden.grad is None
    assert case.ref_head.weight.grad is None


def test_without_a_reference_there_is_no_kl():
    found = make(paired=False, entries=0).statistics()
    assert found.ref_logp is found.reverse_kl is found.forward_kl is found.entries_logp is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_from_logits(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    z, z_ref = 2 * torch.randn(2, *shape, 300, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(300, shape, generator=generator)
    z, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    found = from_logits(z.mT.contiguous().mT if len(shape) == 1 else z, targets, z_ref, temperature=1.5)
    expected = fused_statistics.statistics_of_logits(wide / 1.5, targets, z_ref.double() / 1.5)
    compare(found, expected, EXACT if dtype == torch.float64 else SINGLE)
    compare_gradients(cases.weighted_sum(found), [z], cases.weighted_sum(expected), [wide], cases.GRADIENT[dtype])


# Values where the mask is 0 have no effect, and a batch may have no live token.


SHAPE = (4, 5)
LIVE = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.fixture
def filled_memory():
    """Fill uninitialised memory with NaN, so that reading it is detected."""
    torch.use_deterministic_algorithms(True)
    assert getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009, pyright does not know it
    yield
    torch.use_deterministic_algorithms(False)


def spoilt(case, mask):
    """Garbage at every masked position."""
    dead = mask == 0
    put = lambda x, value: x.masked_fill(dead[..., None] if x.ndim > dead.ndim else dead, value)
    return replace(
        case,
        hidden=put(case.hidden, torch.nan),
        targets=put(case.targets, -100),
        ref_hidden=put(case.ref_hidden, torch.inf),
        entries=put(case.entries, 10**6),
    ).require_grad()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32], ids=str)
@pytest.mark.usefixtures("small_tiles", "filled_memory")
def test_masked_rows_have_no_effect(dtype):
    case = make(SHAPE, bias=True)
    masked = spoilt(case, LIVE)
    found = masked.statistics(mask=LIVE.to(dtype), divergence="jensen-shannon")
    case.require_grad()
    zero = lambda x: x * (LIVE[..., None] if x.ndim > LIVE.ndim else LIVE)
    expected = type(found)(*(zero(x) for x in case.statistics(divergence="jensen-shannon")))
    compare(found, expected, EXACT)
    gradients = torch.autograd.grad(cases.weighted_sum(found), masked.leaves)
    for gradient, truth in zip(gradients, torch.autograd.grad(cases.weighted_sum(expected), case.leaves), strict=True):
        EXACT.check(gradient, truth)
    assert (gradients[0][LIVE == 0] == 0).all()


def test_masked_logits_have_no_effect():
    generator = torch.Generator().manual_seed(0)
    z, z_ref = torch.randn(2, *SHAPE, 9, generator=generator, dtype=torch.float64)
    targets = torch.randint(9, SHAPE, generator=generator)
    dead = LIVE == 0
    bad = z.masked_fill(dead[..., None], torch.nan).requires_grad_()
    z.requires_grad_()
    found = from_logits(bad, targets.masked_fill(dead, -100), z_ref.masked_fill(dead[..., None], torch.nan), mask=LIVE)
    expected = type(found)(*(None if x is None else x * LIVE for x in from_logits(z, targets, z_ref)))
    compare(found, expected, EXACT)
    compare_gradients(cases.weighted_sum(found), [bad], cases.weighted_sum(expected), [z], EXACT)


def test_masked_logits_are_not_copied():
    """The graph keeps the caller's own logits, and nothing else of their size."""
    z, z_ref = torch.randn(2, *SHAPE, 300)
    z.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        from_logits(z, torch.zeros(SHAPE, dtype=torch.long), z_ref, mask=LIVE)
    large = [x.data_ptr() for x in saved if x.numel() > 300]
    assert sorted(large) == sorted([z.data_ptr(), z_ref.data_ptr()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("why", ["all masked", "no tokens"])
@pytest.mark.usefixtures("filled_memory")
def test_without_a_live_token_everything_is_zero(why, dtype):
    shape = (2, 3) if why == "all masked" else (2, 0)
    case, mask = make(shape, bias=True, dtype=dtype), torch.zeros(shape)
    case = spoilt(case, mask) if why == "all masked" else case.require_grad()
    for options in ({"mask": mask}, {"mask": mask, "mode": "fast"}) + (({},) if why == "no tokens" else ()):
        found = case.statistics(**options, divergence="jensen-shannon")
        assert all(x.shape[:2] == shape and (x == 0).all() for x in found)
        gradients = torch.autograd.grad(cases.weighted_sum(found), case.leaves)
        assert all((g == 0).all() for g in gradients)


def test_logits_without_a_live_token():
    z = torch.full((2, 5), torch.nan, requires_grad=True)
    found = from_logits(z, torch.tensor([-100, -100]), z.detach(), mask=torch.zeros(2))
    assert (found.reverse_kl == 0).all()
    (gradient,) = torch.autograd.grad(cases.weighted_sum(found), z)
    assert (gradient == 0).all()


# Divergences to several references: the weighted sum of the definitions, and one pass over the policy's logits.


NUMBERS = (0.7, 0.9)
TABLE = (torch.linspace(0.2, 1.4, 7).double(), torch.tensor(0.5).double())
"""One weight for each token of the first reference, and the same for all of the second."""
FIELDS = {"bias": True, "policy": {"temperature": 1.4, "softcap": 3.0}}


def two(**settings):
    """A policy, and two references with other widths and other transforms of the logits."""
    first = make(**FIELDS, ref_size=11, ref_bias=True, ref={"softcap": 2.0, "scale": 0.7}, **settings)
    other = make(seed=1, ref_size=5, ref={"temperature": 0.8}, **settings)
    return first, other


def found_by(case, other, weights, **options):
    references = ([case.ref_hidden, other.ref_hidden], [case.ref_head, other.ref_head])
    given = (case.hidden, case.head, case.targets, *references)
    return token_statistics(*given, ref_weights=weights, entries=case.entries, **options)


def defined(case, other, weights, divergence=None):
    """The sums of what the definition says of each reference."""
    one = case.specification(divergence)
    given = (case.hidden, case.head, case.targets, other.ref_hidden, other.ref_head)
    both = one, fused_statistics.reference_statistics(*given, divergence=divergence)
    total = lambda name: sum(w * getattr(x, name) for w, x in zip(weights, both, strict=True))
    names = ["ref_logp", "reverse_kl", "forward_kl", *(["divergence"] if divergence else [])]
    return one._replace(**{name: total(name) for name in names})


def check(case, other, weights, tolerance=EXACT, divergence=None, **options):
    wide, far = case.to(torch.float64).require_grad(), other.to(torch.float64)
    found = found_by(case.require_grad(), other, weights, divergence=divergence, **options)
    expected = defined(wide, far, weights or (0.5, 0.5), divergence)
    for name, value in found._asdict().items():
        if value is not None:
            tolerance.check(value, getattr(expected, name))
    compare_gradients(cases.weighted_sum(found), case.leaves, cases.weighted_sum(expected), wide.leaves, tolerance)


@pytest.mark.parametrize("divergence", [None, *GENERATORS], ids=str)
@pytest.mark.parametrize("weights", [NUMBERS, TABLE, None], ids=["numbers", "by token", "equal"])
@pytest.mark.usefixtures("small_tiles")
def test_value_and_gradient_are_the_weighted_sums(weights, divergence):
    check(*two(), weights, divergence=divergence)


def test_in_float32_with_a_mask():
    case, other = two(dtype=torch.float32)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1])
    found = found_by(case, other, [x.float() for x in TABLE], divergence="jensen-shannon", mask=mask)
    wide = defined(case.to(torch.float64), other.to(torch.float64), TABLE, jensen_shannon())
    SINGLE.check(found.divergence, wide.divergence * mask)
    SINGLE.check(found.reverse_kl, wide.reverse_kl * mask)


def test_the_policy_is_projected_once_for_all(monkeypatch):
    """In the forward pass, for a divergence, and in the backward pass; and so are the gradients' products."""
    calls, whole = Counter(), tiling.matmul_t
    monkeypatch.setattr(tiling, "matmul_t", lambda h, w, out: calls.update({h.shape[1]: len(h)}) or whole(h, w, out))
    case, other = two()
    found = found_by(case.require_grad(), other, NUMBERS, divergence="hellinger")
    found.divergence.sum().backward()
    assert calls == {16: 3 * 7, 11: 3 * 7, 5: 3 * 7}  # tokens, by the width of the model


def test_one_in_a_list_is_one():
    case = make(entries=0)
    given = (case.hidden, case.head, case.targets)
    alone, listed = case.statistics(), token_statistics(*given, [case.ref_hidden], [case.ref_head], ref_weights=[1.0])
    for x, y in zip(alone, listed, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


def test_bad_input():
    case, other = two()
    with pytest.raises(KernelInputError, match=r"2 `ref_weights`, one for each reference; received 1"):
        found_by(case, other, [1.0])
    with pytest.raises(KernelInputError, match="as many `ref_head` as `ref_hidden`"):
        token_statistics(case.hidden, case.head, case.targets, [case.ref_hidden], [case.ref_head, other.ref_head])


# Together with autocast, checkpointing and compilation.


def gradients_of(case, total):
    return torch.autograd.grad(total, case.leaves)


@pytest.mark.parametrize("backward", ["inside", "outside"])
@pytest.mark.usefixtures("small_tiles")
def test_autocast_is_the_same_as_casting(backward):
    """Inputs are cast, and gradients have the dtype of their tensors; sums stay float32."""
    case = make(dtype=torch.float32, bias=True).require_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = case.statistics()
        total = cases.weighted_sum(found)
        gradients = gradients_of(case, total) if backward == "inside" else None
    gradients = gradients or gradients_of(case, total)
    cast = case.to(torch.bfloat16)
    cast = replace(cast, head=replace(cast.head, bias=case.head.bias.detach()))
    explicit = cast.require_grad().statistics()
    assert found.logp.dtype == torch.float32
    compare(found, explicit, SINGLE)
    for x, y in zip(gradients, gradients_of(cast, cases.weighted_sum(explicit)), strict=True):
        assert x.dtype == torch.float32
        BFLOAT16.check_vector(x, y.float())


def test_autocast_leaves_float64_and_given_logits_alone():
    case, z = make(), torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, of_logits = case.statistics(), from_logits(z, targets)
    compare(found, case.specification(), EXACT)
    SINGLE.check(of_logits.logp, z.double().log_softmax(-1).gather(1, targets[:, None])[:, 0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_checkpointing(reentrant):
    case = make(bias=True).require_grad()

    def loss(hidden, weight, bias):
        head = replace(case.head, weight=weight, bias=bias)
        return cases.weighted_sum(replace(case, hidden=hidden.tanh(), head=head).statistics())

    plain = gradients_of(case, loss(*case.leaves))
    checkpointed = checkpoint(loss, *case.leaves, use_reentrant=reentrant)
    found = torch.autograd.backward(checkpointed) or [x.grad for x in case.leaves]
    for x, y in zip(found, plain, strict=True):
        EXACT.check_vector(x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks, and means to hide the warning
def test_compilation_goes_around_it():
    case = make(bias=True, dtype=torch.float32).require_grad()

    def loss(hidden):
        found = replace(case, hidden=torch.tanh(hidden) * 2).statistics()
        return cases.weighted_sum(found) * 3 + from_logits(hidden, case.targets % 16, -hidden.detach()).forward_kl.sum()

    compiled = torch.compile(loss, backend="eager")
    expected, found = loss(case.hidden), compiled(case.hidden)
    SINGLE.check(found, expected)
    compare_gradients(found, case.leaves, expected, case.leaves, SINGLE)


# A KL term from hidden states: the expected gradient, summed over every outcome.
#
# A tabular policy is a linear head: the hidden state is the one-hot of the prefix, the weight is the table of logits.
# So the expected gradient to the *weight* must be that of the exact divergence.

PROBLEM = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
PREFIX = ImportanceWeighting("prefix", bound=None)


def loss_gradients(problem, term, rows, probability, group=None):
    """E[∇loss] to the policy's weight: the weighted sum over batches of completions `rows` (M, size)."""
    weight = problem.logits.T.contiguous().requires_grad_()  # (V, P)
    total = torch.zeros_like(weight)
    for members, chance in zip(rows, probability, strict=True):
        hidden = torch.eye(problem.space.prefixes, dtype=torch.float64)[problem.space.prefix[members]]
        mask = problem.space.mask[members]
        found = token_statistics(
            hidden, Head(weight), problem.space.tokens[members], hidden, Head(problem.ref_logits.T), mask=mask
        )
        rollout = found.rollout(mask, behavior_logp=problem.behavior_logp[members], group=group)
        total += chance * torch.autograd.grad(term(rollout).loss, weight)[0]
    return total.T.flatten()


TERMS = {
    "facts 11 and 16: token": (KLTerm(level="token", estimator="exact"), 1, "reverse-kl-token-sampler"),
    "fact 12: sampled": (KLTerm(), 1, "reverse-kl-sequence"),
    "forward, token": (KLTerm(divergence="forward", level="token", estimator="exact"), 1, "forward-kl-token"),
    "fact 16: prefix": (KLTerm(level="token", estimator="exact", weighting=PREFIX), 1, "reverse-kl-token"),
    "fact 17: sequence": (KLTerm(estimator="exact", weighting=PREFIX), 1, "reverse-kl-sequence"),
    "leave-one-out": (KLTerm(estimator="exact", baseline="leave_one_out"), 2, "reverse-kl-sequence"),
    "leave-one-out, prefix": (
        KLTerm(estimator="exact", baseline="leave_one_out", weighting=PREFIX), 2, "reverse-kl-sequence"),
}  # fmt: skip
"""Term, completions in a group, and target; those without a ratio, but for the first, on their own samples."""


@pytest.mark.parametrize("name", TERMS)
def test_the_expected_gradient_of_a_term(name):
    term, size, target = TERMS[name]
    on_policy = term.weighting is None and not target.endswith("sampler")
    problem = PROBLEM.on_policy() if on_policy else PROBLEM
    group = torch.zeros(2, dtype=torch.long) if size == 2 else None
    found = loss_gradients(problem, term, *every_group(problem, size), group=group)
    EXACT.check_vector(found, target_gradients(problem)[target])


@pytest.mark.parametrize("discount", [0.5, 0.9])
def test_fact_13_a_discounted_term_by_its_definition(discount):
    """E[ Σ_t ∇KL_t + s_t Σ_{s>t} g^(s-t) KL_s ], from the scores and gradients of the problem."""
    problem = PROBLEM.on_policy()
    kl, steps = problem.at_tokens(problem.prefix_kl()), problem.space.length
    future = torch.zeros_like(kl)
    for t in range(steps):
        for s in range(t + 1, steps):
            future[:, t] += discount ** (s - t) * kl[:, s]
    truth = problem.probability @ (kl_gradients(problem) + future[..., None] * problem.scores).sum(1)
    term = KLTerm(estimator="exact", discount=discount)
    EXACT.check_vector(loss_gradients(problem, term, *every_group(problem, 1)), truth)
