"""What a `Rollout` accepts, what it refuses, and the messages."""

import numpy
import pytest
import torch

from klgrad import ImportanceWeighting, KLTerm, Rollout, consistency_loss, kl_report, mismatch_report
from klgrad.core.rollout import DIVERGENCES, checked_at_the_end
from klgrad.errors import KlgradError, RolloutError

LOGP = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
MASK = torch.tensor([[1, 1], [1, 0]])


def with_value(x, value, at):
    x = x.clone()
    x[at] = value
    return x


BANNED = with_value(LOGP, float("-inf"), (0, 1))
BAD = {
    "`logp` as a torch tensor; received list; remedy: wrap it": {"logp": [[-1.0, -2.0]]},
    r"`ref_logp` of shape \(2, 2\), that of `logp`; received shape \(2, 1\); remedy: align": {"ref_logp": LOGP[:, :1]},
    r"`logp` of shape \(B, T\).*received shape \(2,\)": {"logp": LOGP[0]},
    r"B, T >= 1; received shape \(0, 2\)": {"logp": LOGP[:0]},
    r"a `mask` of 0 and 1; received 0.5 at \[0, 1\]": {"mask": torch.tensor([[1.0, 0.5], [1, 0]])},
    r"received 2 at \[0, 1\]": {"mask": torch.tensor([[1, 2], [1, 0]])},
    r"`logp` finite.*received nan at \[1, 0\].*find the NaN": {"logp": with_value(LOGP, float("nan"), (1, 0))},
    r"received 0.7 at \[0, 1\]; remedy: pass log-softmax": {"logp": with_value(LOGP, 0.7, (0, 1))},
    r"`ref_logp`.*received inf at \[0, 0\]": {"ref_logp": with_value(LOGP, float("inf"), (0, 0))},
    r"`ref_logp`.*received -inf at \[0, 1\].*0: mask the position": {"ref_logp": BANNED},
    r"`behavior_logp`.*received -inf at \[0, 1\]": {"behavior_logp": BANNED},
    "`logp` of a floating dtype of 16 bits or more; received torch.int64": {"logp": torch.ones(2, 2, dtype=torch.long)},
    r"`group` of shape \(2,\).*received shape \(3,\)": {"group": torch.zeros(3, dtype=torch.long)},
    r"of integers, or of strings; received shape \(2,\), torch.float32": {"group": torch.zeros(2)},
    r"of integers, or of strings; received \[0.0, 1.0\]": {"group": [0.0, 1.0]},
    r"`group` of shape \(2,\).*received \['a'\]": {"group": ["a"]},
    "`ref_logp` as a torch tensor; received NoneType; remedy: pass it": {"ref_logp": None},
    "of 16 bits or more; received torch.float8_e4m3fn": {"logp": LOGP.to(torch.float8_e4m3fn)},
    "`token_reverse_kl` finite and >= 0.*received -0.2": {"token_reverse_kl": with_value(-LOGP, -0.2, (0, 0))},
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_says_what_was_expected_received_and_to_do(text):
    with pytest.raises(RolloutError, match=text) as caught:
        Rollout(**{"logp": LOGP, "ref_logp": LOGP, "mask": MASK, **BAD[text]})
    assert isinstance(caught.value, KlgradError)
    assert isinstance(caught.value, ValueError)
    assert all((caught.value.expected, caught.value.received, caught.value.remedy))


GROUPS = {
    "list": [7, 7, 3],
    "tuple": (7, 7, 3),
    "list of NumPy integers": list(numpy.array([7, 7, 3])),
    "NumPy": numpy.array([7, 7, 3], dtype=numpy.uint16),
    "NumPy, reversed view": numpy.array([3, 7, 7])[::-1],
    "tensor": torch.tensor([7, 7, 3], dtype=torch.int32),
    "strings": ["7", "7", "3"],
    "NumPy strings": numpy.array(["7", "7", "3"]),
    "NumPy objects, as verl's uid": numpy.array(["7", "7", "3"], dtype=object),
}


@pytest.mark.parametrize("labels", GROUPS.values(), ids=GROUPS)
def test_a_group_may_be_labelled_by_integers_or_strings_of_any_container(labels):
    logp = -torch.arange(1.0, 7.0).reshape(3, 2)
    rollout = Rollout(logp, logp - 0.5, torch.ones(3, 2), group=labels)
    assert rollout.group is not None
    assert rollout.group.dtype == torch.long
    assert torch.unique(rollout.group, return_counts=True)[1].tolist() in ([2, 1], [1, 2])
    assert rollout.group[0] == rollout.group[1] != rollout.group[2]
    assert kl_report(rollout).estimates["kl/reverse/k1/per_token"].clusters == 2


OF_ANY_TYPE = {
    "None": None, "list": LOGP.tolist(), "NumPy": LOGP.numpy(), "integer": 2, "object": object(),
    "complex": LOGP.to(torch.complex64), "3 dimensions": LOGP[None],
    "complex labels": torch.zeros(2, dtype=torch.complex64),
    "mixed": [0, "a"], "beyond 64 bits": [2**70, 1], "NaN": [float("nan"), 1], "NumPy matrix": numpy.array([[0, 1]]),
}  # fmt: skip
MAY_BE_NONE = ("behavior_logp", *DIVERGENCES, "group")


NOT_FINITE = {name: float(name) for name in ("nan", "inf", "-inf")}


def not_refused(call, junk=OF_ANY_TYPE):
    """The values that `call` accepts or refuses by another exception than RolloutError; there should be none."""
    found = {}
    for name, x in junk.items():
        try:
            found[name] = call(x)
        except RolloutError:
            continue
        except Exception as error:
            found[name] = error
    return found


@pytest.mark.parametrize("field", ["logp", "ref_logp", "mask", *MAY_BE_NONE])
def test_a_field_of_a_wrong_type_is_a_rollout_error(field):
    """Never an AttributeError, a TypeError or an error of torch."""
    taken = not_refused(lambda x: Rollout(**{"logp": LOGP, "ref_logp": LOGP, "mask": MASK, field: x}))
    assert list(taken) == (["None"] if field in MAY_BE_NONE else []), taken


@pytest.mark.parametrize("name", ["logp", "behavior_logp", "mask"])
def test_so_is_an_argument_of_a_mismatch_report(name):
    right = {"logp": LOGP, "behavior_logp": LOGP, "mask": MASK}
    assert not_refused(lambda x: mismatch_report(**right | {name: x})) == {}


def test_so_is_the_reward_of_a_consistency_loss():
    rollout = Rollout(LOGP, LOGP, MASK, group=[0, 0])
    assert not_refused(lambda x: consistency_loss(rollout, x, 0.5)) == {}
    assert not_refused(lambda x: consistency_loss(rollout, torch.tensor([x, 1.0]), 0.5), NOT_FINITE) == {}


def test_rounding_above_zero_is_allowed_by_the_precision_of_the_dtype():
    Rollout(with_value(LOGP, 1e-6, (0, 0)), LOGP, MASK)
    Rollout(with_value(LOGP, 0.03, (0, 0)).half(), LOGP, MASK)
    with pytest.raises(RolloutError):
        Rollout(with_value(LOGP, 1e-4, (0, 0)), LOGP, MASK)


def test_only_the_policy_keeps_its_gradient():
    logp, ref, behavior = (LOGP.clone().requires_grad_() for _ in range(3))
    rollout = Rollout(logp, ref, MASK, behavior_logp=behavior)
    assert rollout.logp.requires_grad
    assert not rollout.ref_logp.requires_grad
    assert not rollout.behavior_logp.requires_grad


def test_mixed_dtypes_take_the_widest_and_at_least_float32():
    assert Rollout(LOGP.half(), LOGP.bfloat16(), MASK).logp.dtype == torch.float32
    assert Rollout(LOGP.half(), LOGP.double(), MASK).ref_logp.dtype == torch.float64


def test_a_batch_without_live_tokens_has_value_zero_and_raises_nothing():
    rollout = Rollout(LOGP, LOGP - 1, 0 * MASK, behavior_logp=LOGP, group=torch.zeros(2, dtype=torch.long))
    for term in (KLTerm(), KLTerm(reduction="token"), KLTerm(weighting=ImportanceWeighting("prefix", bound=None))):
        result = term(rollout)
        assert float(result.loss) == 0
        assert not bool(result.coefficient.any())
    kl_report(rollout)


def test_a_missing_field_that_a_term_needs_is_named():
    off_policy = KLTerm(weighting=ImportanceWeighting("prefix", bound=None))
    for term, group, text in (
        (off_policy, None, "`behavior_logp` for an off-policy term; received none; remedy: pass"),
        (KLTerm(estimator="exact"), None, "`token_reverse_kl` for estimator='exact'"),
        (KLTerm(divergence="forward", level="token", estimator="exact"), None, "`token_forward_kl` for estimator="),
        (KLTerm(baseline="leave_one_out"), None, "a `group` index per completion for a group statistic"),
        (KLTerm(baseline="leave_one_out"), [7, 8], "at least 2 completions in every group.*received group 7 with 1"),
    ):
        with pytest.raises(RolloutError, match=text):
            term(Rollout(LOGP, LOGP, MASK, group=group))


def two_rollouts(second, reached):
    with checked_at_the_end():
        Rollout(LOGP, LOGP, MASK)
        Rollout(LOGP, second, MASK)
        reached.append(True)


def test_values_can_be_checked_later():
    """The check runs at the end of the block, before the code after it."""
    bad, reached = with_value(LOGP, float("nan"), (1, 0)), []
    two_rollouts(LOGP, [])
    with pytest.raises(RolloutError, match=r"`ref_logp`.*received nan at \[1, 0\]"):
        two_rollouts(bad, reached)
    assert reached


def test_values_are_checked_at_once_again_after_an_error():
    with pytest.raises(RolloutError, match="shape"):
        two_rollouts(LOGP[:1], [])
    with pytest.raises(RolloutError):
        Rollout(LOGP, with_value(LOGP, float("nan"), (1, 0)), MASK)
