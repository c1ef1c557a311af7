"""The names of every framework are recognised; an error about a missing column suggests similar names."""

import pytest

from klgrad.logs import LogError
from klgrad.logs.reader import EXAMPLES, assign, parse_choices
from klgrad.support import GROUP, MASK, ROLES, WHOSE, role_of

FRAMEWORKS = {
    "TRL": "per_token_logps ref_per_token_logps old_per_token_logps sampling_per_token_logps completion_mask",
    "verl": "log_prob ref_log_prob old_log_probs rollout_log_probs response_mask",
    "OpenRLHF": "action_log_probs base_action_log_probs old_action_log_probs rollout_log_probs action_mask",
    "prime-rl": "trainer_logprobs ref_logprobs old_logp inference_logprobs loss_mask",
    "tinker": "training_logprobs base_logprobs old_logp sampling_logprobs mask",
    "torchtune": "pi_logprobs ref_logprobs pi_old_logprobs behavior_logp mask",
    "cleanrl": "newlogprob ref_logp b_logprobs behavior_logp mask",
    "NeMo RL": "curr_logprobs reference_policy_logprobs prev_logprobs generation_logprobs token_mask",
    "slime": "log_probs ref_log_probs old_log_probs rollout_log_probs loss_masks",
    "ROLL": "log_probs ref_log_probs old_log_probs infer_logprobs response_mask",
    "open-instruct": "new_logprobs ref_logprobs old_logprobs vllm_logprobs response_masks",
    "distillation": "student_logps teacher_logps old_logps sampler_logps assistant_masks",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_names_are_recognised(framework):
    names = FRAMEWORKS[framework].split()
    roles = ("logp", "ref_logp", "old_logp", "behavior_logp", "mask")
    assert assign(["reward", *reversed(names)], {}) == dict(zip(roles, names, strict=True))


def test_no_name_has_two_roles():
    words = [word for words in WHOSE.values() for word in words]
    assert len(words) == len(set(words))
    assert {role_of(name) for name in ROLES} == {(role, -1) for role in ROLES}
    for role, names in (*EXAMPLES.items(), ("mask", MASK), ("group", GROUP)):
        assert {found[0] for name in names if (found := role_of(name))} == {role}, role


def test_what_a_name_does_not_say_is_not_guessed():
    for name in ("attention_mask", "logits", "top_logprobs", "sum_logp", "cumulative_logprob", "prompt_ids", "reward"):
        assert role_of(name) is None, name


def test_areal_calls_the_engines_log_probs_plainly_logprobs():
    areal = ["logprobs", "prox_logp", "ref_logp", "loss_mask"]
    names = {"logp": "prox_logp", "ref_logp": "ref_logp", "behavior_logp": "logprobs", "mask": "loss_mask"}
    assert assign(areal, {}) == names
    assert assign(areal, {"logp": "logprobs"})["logp"] == "logprobs"


def test_the_plainest_name_is_taken_last():
    assert assign(["logprobs", "ref_logp", "trainer_logprobs"], {})["logp"] == "trainer_logprobs"
    assert assign(["teacher_logp", "logp", "policy_logp", "ref_logprobs"], {}) == {
        "logp": "logp",
        "ref_logp": "ref_logprobs",
    }
    assert assign(["prompt", "uid", "logp", "ref_logp"], {})["group"] == "uid"


def test_a_column_can_be_left_out():
    chosen = parse_choices(["mask=", "group="])
    assert assign(["logp", "ref_logp", "mask", "uid"], chosen) == {"logp": "logp", "ref_logp": "ref_logp"}


def test_capitals_do_not_matter_and_a_choice_wins():
    assert assign(["LogP", "Ref_Logp"], {}) == {"logp": "LogP", "ref_logp": "Ref_Logp"}
    chosen = assign(["logp", "mine", "ref_logp"], {"logp": "mine"})
    assert chosen["logp"] == "mine"
    swapped = assign(["logp", "ref_logp"], {"logp": "ref_logp", "ref_logp": "logp"})
    assert swapped == {"logp": "ref_logp", "ref_logp": "logp"}


@pytest.mark.parametrize(
    ("present", "chosen", "message"),
    [
        (["logp", "ref_logpp", "reward"], {}, "did you mean 'ref_logpp'? name it with --column ref_logp=NAME"),
        (["logp", "reward"], {}, "received columns logp, reward; remedy: name it with --column ref_logp=NAME"),
        (["my_logps", "ref_logp"], {}, "did you mean 'my_logps'"),
        ([], {}, "received columns (none)"),
        (["logp", "reference"], {"ref_logp": "referenc"}, "did you mean 'reference'"),
    ],
)
def test_an_error_about_a_missing_column_suggests_a_similar_one(present, chosen, message):
    with pytest.raises(LogError) as error:
        assign(present, chosen)
    assert message in str(error.value)


def test_choices_are_role_and_name():
    assert parse_choices(["ref-logp=a", "mask = b"]) == {"ref_logp": "a", "mask": "b"}
    for bad in ("logp", "nonsense=a", "logp="):
        with pytest.raises(LogError, match="ROLE=NAME"):
            parse_choices([bad])
