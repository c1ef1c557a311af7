"""From verl's configuration to a term: what is accepted, and the sentence for each thing that is refused."""

import pytest
from on_verl.configuration import HAS_VERL, composed, small

from klgrad import Clip, ImportanceWeighting, KLTerm, Truncate
from klgrad.errors import KlgradError, MeaningError, UnknownNameError
from klgrad.integrations import AdaptiveCoefficient
from klgrad.verl.declaration import (
    VerlObjective,
    load_beta,
    notes,
    read_declaration,
    save_beta,
    step_folder,
    term_of,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")

ADVANTAGE, LOO, PREFIX = {"placement": "advantage"}, {"baseline": "leave_one_out"}, {"ratio": "prefix"}
TOP_K = {"reference": "teacher", "estimator": "exact", "level": "token"}
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
CORRECTION, DISTILLATION = "algorithm__rollout_correction__", "distillation__distillation_loss__"
DISTILLS = {"distillation__enabled": True}
RETURNS_TOP_K = {**DISTILLS, f"{DISTILLATION}loss_mode": "forward_kl_topk"}


def teacher(**node):
    return {"klgrad": {"reference": "teacher", **node}, **DISTILLS}


def test_the_defaults_are_a_term():
    found = read_declaration(small())
    assert found.term == KLTerm()
    assert (found.coef, found.placement, found.in_advantage) == (0.05, "loss", False)
    assert found == VerlObjective() == term_of({}) == term_of({"influence_bound": None, "target": None})
    with pytest.raises(KlgradError):
        VerlObjective(placement="nowhere")


def test_every_field_of_a_term_can_be_declared():
    """Those of the weighting too, whose default bound is that of the trainer on TRL."""
    described = {"divergence": "reverse", "level": "sequence", "estimator": "k1_k3", "discount": 0.5, **LOO}
    described["influence_bound"] = 3.0
    for bounded, bound in (({"ratio_bound": "clip:0.5:2"}, Clip(0.5, 2.0)), ({}, Truncate(2.0))):
        declaration = read_declaration(small(klgrad={**described, **PREFIX, **bounded, **ADVANTAGE}))
        assert declaration.term == KLTerm(**described, weighting=ImportanceWeighting("prefix", bound))


REFUSED = {
    "verl's loss": ({f"{ACTOR}use_kl_loss": True}, "`klgrad` and actor_rollout_ref.actor.use_kl_loss=True"),
    "verl's reward": ({"algorithm__use_kl_in_reward": True}, "`klgrad` and algorithm.use_kl_in_reward=True"),
    "distillation": (DISTILLS, "distillation.enabled=True"),
    "teacher without distillation": ({"klgrad": {"reference": "teacher"}}, "distillation.enabled=False"),
    "teacher in the advantage": (teacher(**ADVANTAGE), "only workers have the teacher's log-probs"),
    "teacher and target": (teacher(target=1.0), "received placement=loss, target=1.0"),
    "top-k teacher": ({**teacher(), **RETURNS_TOP_K}, "loss_mode=forward_kl_topk"),
    "exact": ({"klgrad": {"estimator": "exact"}}, "received estimator=exact; remedy: write estimator=k1"),
    "exact with sampled log-probs": (teacher(**TOP_K), "loss_mode=forward_kl_topk; received k3"),
    "exact between completions": (
        {**teacher(**{**TOP_K, "level": "sequence"}), **RETURNS_TOP_K},
        "received level=sequence, ratio=none",
    ),
    "exact with a ratio": ({**teacher(**TOP_K, **PREFIX), **RETURNS_TOP_K}, "received level=token, ratio=prefix"),
    "exact on Megatron": (
        {**teacher(**TOP_K), **RETURNS_TOP_K, f"{ACTOR}strategy": "megatron"},
        "FSDP without sequence parallelism with estimator=exact",
    ),
    "baseline in the loss": ({"klgrad": LOO}, "remedy: write placement=advantage"),
    "rejection": ({f"{CORRECTION}rollout_rs": "token_k1"}, "rollout_rs=token_k1"),
    "no engine log-probs": ({"klgrad": PREFIX, f"{ROLLOUT}calculate_log_probs": False}, "calculate_log_probs=False"),
    "other loss mode": ({"klgrad": ADVANTAGE, f"{ACTOR}policy_loss": {"loss_mode": "gspo"}}, "received gspo"),
    "sum in the advantage": ({"klgrad": {"reduction": "sequence", **ADVANTAGE}}, "reduction=policy"),
    "old as the sampler of old": ({"klgrad": {"sampler": "old", **PREFIX, **ADVANTAGE}}, "whose ratio to itself is 1"),
    "bypass": ({"klgrad": ADVANTAGE, f"{CORRECTION}bypass_mode": True}, "bypass_mode=True"),
    "weighted twice": ({"klgrad": ADVANTAGE, f"{CORRECTION}rollout_is": "token"}, "rollout_is=token"),
    "nothing declared": ({"klgrad": None}, "add +klgrad.coef=0.05"),
    "negative": ({"klgrad": {"coef": -1}}, "`klgrad.coef` >= 0; received -1"),
    "no number": ({"klgrad": {"coef": "much"}}, "`klgrad.coef` >= 0; received 'much'"),
    "bound": ({"klgrad": {"ratio_bound": "truncate"}}, "`klgrad.ratio_bound` as truncate:MAX"),
    "word": ({"klgrad": {"placement": "reward"}}, "`klgrad.placement` loss or advantage; received 'reward'"),
    "contradiction of the term": ({"klgrad": {"level": "token", "discount": 0.5}}, "discount=0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_why(case):
    changed, sentence = REFUSED[case]
    with pytest.raises(MeaningError) as caught:
        read_declaration(small(**changed))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_setting_is_an_error_with_the_near_one():
    with pytest.raises(UnknownNameError, match="did you mean 'discount'"):
        read_declaration(small(klgrad={"dicount": 1}))


def test_a_kl_in_the_loss_allows_what_the_advantage_does_not():
    """Each of these is refused above with placement=advantage."""
    for changed in (
        {f"{ACTOR}policy_loss": {"loss_mode": "gspo"}},
        {f"{CORRECTION}bypass_mode": True},
        {f"{CORRECTION}rollout_is": "token"},
        {"klgrad": {"reduction": "sequence"}},
        {"klgrad": {"sampler": "old", **PREFIX}},
    ):
        read_declaration(small(**changed))


NO_REWARDS = {f"{DISTILLATION}use_task_rewards": False}


def test_distillation_without_rewards_drops_the_policy_loss():
    assert read_declaration(small(**teacher())).task_rewards
    assert not read_declaration(small(**teacher(), **NO_REWARDS)).task_rewards


ASYNC = {"trainer__v1": {"trainer_mode": "colocate_async"}}
NOTED = {
    "epochs": ({f"{ACTOR}ppo_epochs": 2}, "2 updates on each batch trains on completions"),
    "mini-batches": ({"data__train_batch_size": 32}, "4 updates on each batch"),
    "async": (ASYNC, "trainer_mode=colocate_async"),
    "async in the advantage": ({**ASYNC, "klgrad": ADVANTAGE}, "clipped surrogate"),
    "mean of each": ({f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}, "that of no divergence"),
    "nucleus": ({f"{ROLLOUT}top_p": 0.9}, "rollout.top_p=0.9"),
    "filtered": ({"algorithm__filter_groups__enable": True}, "filter_groups.enable=True"),
    "bypass": ({f"{CORRECTION}bypass_mode": True}, "that of the engine's policy"),
    "temperature of the teacher": ({**teacher(), f"{ROLLOUT}temperature": 0.7}, "rollout.temperature=0.7"),
    "entropy": ({f"{ACTOR}entropy_coeff": 0.1}, "entropy_coeff=0.1"),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_changes_the_meaning_is_said(case):
    changed, sentence = NOTED[case]
    config = small(**changed)
    (said,) = notes(config, read_declaration(config))
    assert sentence in said


def test_nothing_is_said_of_settings_that_keep_the_meaning():
    for changed in (
        {},
        {"klgrad": PREFIX, f"{ACTOR}ppo_epochs": 2},
        {f"{ROLLOUT}temperature": 0.7},  # of policy and reference alike
        {**teacher(), **NO_REWARDS, f"{ACTOR}entropy_coeff": 0.1},  # of the policy loss, which is dropped
    ):
        config = small(**changed)
        assert notes(config, read_declaration(config)) == []


@pytest.mark.skipif(not HAS_VERL, reason="verl is not installed")
def test_the_command_line_of_verl_declares_a_term():
    config = composed("+klgrad.level=token", "+klgrad.coef=0.01", "+klgrad.ratio=prefix", "+klgrad.ratio_bound=none",
                      "actor_rollout_ref.rollout.calculate_log_probs=true")  # fmt: skip
    found = read_declaration(config)
    assert found.term.name == "reverse-token-k1-prefix-ratio"
    assert found.coef == 0.01


@pytest.mark.skipif(not HAS_VERL, reason="verl is not installed")
def test_the_small_configuration_of_these_tests_has_verls_names_and_defaults():
    def check(mine, theirs, path):
        for name, value in mine.items():
            assert name in theirs, f"{path}{name}"
            if isinstance(value, dict):
                check(value, theirs[name], f"{path}{name}.")
            else:
                defaults.setdefault(f"{path}{name}", (value, theirs[name]))

    defaults, mine = {}, small()
    del mine["klgrad"]
    check(mine, composed(), "")
    differ = {name for name, (a, b) in defaults.items() if a != b}
    # Another number of completions, and klgrad's own trainer.
    own = {"data.train_batch_size", "trainer.v1.trainer_mode"}
    assert differ == {"actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size", *own}


def test_a_declaration_tells_what_it_is():
    said = str(term_of({"target": 2.0, "level": "token"}))
    assert said.startswith("reverse-token-k1 in the loss, β=0.05 at first, for 2 nats per sequence: ∇ KL(π‖ref)")
    assert "reduced as loss_agg_mode" in said
    assert "summed over the sequence" in str(term_of({"reduction": "sequence"}))


def test_the_teachers_top_k_are_declared():
    declaration = read_declaration(small(**{**teacher(**TOP_K, divergence="jensen-shannon(0.1)"), **RETURNS_TOP_K}))
    assert "over the teacher's top k, the rest as one entry" in str(declaration)


def test_beta_is_kept_in_the_checkpoint(tmp_path):
    config = {"trainer": {"resume_mode": "auto", "default_local_dir": str(tmp_path), "resume_from_path": None}}
    folder = step_folder(config, 7)
    assert folder == tmp_path / "global_step_7"
    fresh = AdaptiveCoefficient(0.1, target=1.0, horizon=5)
    assert not load_beta(fresh, folder)
    save_beta(AdaptiveCoefficient(0.7, target=1.0, horizon=5), folder)
    assert load_beta(fresh, folder)
    assert fresh.value == 0.7
    config["trainer"] |= {"resume_mode": "resume_path", "resume_from_path": "elsewhere/global_step_3"}
    assert str(step_folder(config, 3)) == "elsewhere/global_step_3"
