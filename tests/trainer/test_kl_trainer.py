"""Short runs of a `KLTrainer`: staleness, an adaptive β, a teacher, logs, warnings, and runs that are resumed."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from tolerances import SAME_STEPS, SINGLE
from trl import GRPOConfig, GRPOTrainer

from klgrad import Rollout
from klgrad.errors import MeaningError, RolloutError
from klgrad.trl import KLConfig, KLTrainer
from klgrad.trl.compat import prompt_keys
from klgrad.trl.metrics import KL, LENGTH, unbiased_kl
from klgrad.trl.scorer import merge_lone_rows, shuffle_groups

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


made, trained = (partial(make, KLTrainer, KLConfig) for make in (tiny.trainer, tiny.trained))


def test_the_embedded_model_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("klgrad.models.resolve", {"smollm2": tiny.folder(), "smollm2:1": tiny.folder(1)}.get)
    settings = {**tiny.SETTINGS, "output_dir": str(tmp_path)}
    trainer = KLTrainer("smollm2", tiny.reward, KLConfig(**settings), train_dataset=tiny.prompts())
    assert trainer.model.config.num_hidden_layers == 2
    student: Any = KLTrainer("smollm2:1", None, KLConfig(**settings, teacher="smollm2"), train_dataset=tiny.prompts())
    assert student.model.config.num_hidden_layers == 1
    assert student.ref_model.config.num_hidden_layers == 2


@pytest.mark.parametrize("repeats", [False, True])
def test_lag(repeats, tmp_path):
    """From the third update on, completions are two generations old; before, others of the start or the first again."""
    trainer = made(tmp_path, rollout_lag=2, rollout_lag_repeats=repeats, kl_ratio="prefix", max_steps=5)
    seen, sampled = [], []
    sample, loss = trainer._sampled_batch, trainer._compute_loss

    def sampling(inputs):
        batch = sample(inputs)
        sampled.append((trainer.state.global_step, batch["completion_ids"], [row["prompt"] for row in inputs]))
        return batch

    def computed(model, inputs):
        seen.append(inputs["completion_ids"])
        assert "old_per_token_logps" in inputs
        return loss(model, inputs)

    trainer._sampled_batch, trainer._compute_loss = sampling, computed
    trainer.train()
    rows = lambda ids: sorted(map(tuple, ids.tolist()))
    steps, ids, prompts = zip(*sampled, strict=True)
    order = [0, 0, 0, 1, 2] if repeats else [1, 2, 0, 3, 4]  # the others are sampled after the first, and go before it
    assert steps == ((0, 1, 2, 3, 4) if repeats else (0, 0, 0, 1, 2, 3, 4))
    assert [rows(batch) for batch in seen] == [rows(ids[i]) for i in order]
    assert repeats or len({tuple(each) for each in prompts[:3]}) == 3
    assert tiny.logged(trainer, "ratio/prefix/effective_sample_size")[-1] < 1


def test_what_is_not_finite_stops_before_the_update(tmp_path, monkeypatch):
    """Its values are looked at after the loss, but no weight has moved by then."""
    trainer = made(tmp_path, max_steps=2)
    before = tiny.weights(trainer)
    forward = GRPOTrainer._get_per_token_logps_and_entropies
    broken = lambda x: torch.where(torch.arange(x.shape[1]) == 0, torch.nan, x)
    replaced = lambda *args, **kwargs: (broken((found := forward(*args, **kwargs))[0]), *found[1:])
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", replaced)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RolloutError, match=r"`logp` finite.*received nan"):
            trainer.train()
    assert torch.equal(tiny.weights(trainer), before)
    assert not [each for each in told if "before the first update" in str(each.message)]  # NaN is no KL to explain
    assert trainer.kl_metrics.held is None  # nothing holds on to the graph


def test_lag_counts_updates(tmp_path):
    """Two generations to an update: a lag of one update is one of two generations."""
    settings = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = made(tmp_path, rollout_lag=1, kl_ratio="prefix", **settings)
    ages, loss, sample = [], trainer._compute_loss, trainer._sampled_batch

    def computed(model, inputs):
        ages.append(trainer.state.global_step - int(inputs["born"][0]))
        return loss(model, inputs)

    born = lambda: {"born": torch.full((8,), trainer.state.global_step)}
    trainer._sampled_batch, trainer._compute_loss = lambda inputs: {**sample(inputs), **born()}, computed
    trainer.train()
    assert ages == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_beta_is_adapted_towards_its_target(placement, tmp_path):
    settings = {"kl_horizon": 2, "max_steps": 4, "kl_placement": placement}
    far, near = (trained(tmp_path / str(target), kl_target=target, **settings) for target in (1e-6, 100.0))
    assert far.coefficient.value > 0.05 > near.coefficient.value
    betas = tiny.logged(far, "kl/coef")
    assert betas[-1] > betas[0]
    if placement == "reward":
        assert float(far.reward_weights[-1]) == pytest.approx(-betas[-1])


def test_an_update_is_logged_as_a_whole(tmp_path):
    """Errors, lengths and what β is fed are those of all its micro-batches."""
    numbers = []
    for rows, steps in ((16, 1), (4, 4)):
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "loss_type": "dr_grpo"}
        trainer = made(tmp_path / str(rows), kl_target=1.0, max_steps=1, **settings)
        tiny.move_reference(trainer)
        trainer.train()
        row = trainer.state.log_history[0]
        logged = {name: x for name, x in row.items() if name.startswith(("kl/", "length/", "log_ratio"))}
        numbers.append({**logged, "beta": trainer.coefficient.value})
    one, four = numbers
    assert one.keys() == four.keys()
    assert one["kl/reverse/k3/per_sequence/standard_error"] > 0
    for name, value in one.items():
        SINGLE.check(four[name], value)


def test_what_is_fed_to_beta_is_weighed(tmp_path):
    """By the declared ratio: on completions of another policy the plain mean is not the KL."""
    logp, ref, mu = -torch.rand(3, 6, 4, generator=torch.Generator().manual_seed(0))
    rollout = Rollout(logp, ref, torch.ones(6, 4), behavior_logp=mu)
    k3 = (logp - ref).neg().exp() - 1 + (logp - ref)
    trainer = made(tmp_path, kl_target=1.0, kl_ratio="sequence", kl_ratio_bound="none")
    SINGLE.check(unbiased_kl(trainer.objective, rollout), ((logp - mu).sum(-1).exp() * k3.sum(-1)).sum())
    # On the sampler's prefixes each token by its own ratio, within its bound, as the term itself.
    on_prefixes = {"kl_level": "token", "kl_ratio": "token", "kl_ratio_bound": "truncate:1.2"}
    trainer = made(tmp_path, kl_target=1.0, max_steps=1, **on_prefixes)
    SINGLE.check(unbiased_kl(trainer.objective, rollout), ((logp - mu).exp().clamp(max=1.2) * k3).sum())
    trainer.train()
    assert trainer.coefficient.value != 0.05


def test_what_no_reward_scores_the_kl_does_not(tmp_path):
    """TRL gives such a completion no advantage; its KL alone must not give it one."""
    some = lambda completions, **_: [None, *[5.0] * (len(completions) - 1)]
    settings = {"scale_rewards": "none", "num_generations": 8, "max_steps": 1}
    trainer = made(tmp_path, reward_funcs=some, kl_placement="reward", **settings)
    batch = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 8)
    SINGLE.check(batch["advantages"], torch.zeros(8))


def test_the_last_row_of_an_evaluation_needs_no_peers(tmp_path):
    settings = {"num_generations_eval": 1, "per_device_eval_batch_size": 4}
    trainer = made(tmp_path, kl_baseline="leave_one_out", **settings)
    found = trainer.evaluate(tiny.prompts(5))
    assert found["eval_kl/reverse/k3/per_token"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_an_evaluation_is_logged_as_a_whole(tmp_path, placement):
    """Means, errors and extremes are those of all its completions, however they come in batches."""
    settings = {"num_generations_eval": 2, "kl_placement": placement, "scale_rewards": "none", "max_steps": 2}
    found = []
    for size in (2, 4, 12):
        trainer = trained(tmp_path, per_device_eval_batch_size=size, **settings)
        said = lambda prompt: [3 + sum(prompt) % 20, *prompt, 1][: 2 + sum(prompt) % 3]
        trainer._generate_single_turn = lambda prompts, *_, said=said, **__: ([said(each) for each in prompts], None)
        found.append(trainer.evaluate(tiny.prompts(6)))
    names = [name for name in found[0] if name.startswith(("eval_kl/", "eval_length/", "eval_log_ratio/"))]
    assert {"eval_kl/reverse/k3/per_token/standard_error", "eval_length/max"} <= set(names)
    for name in names:
        for other in found[1:]:
            SINGLE.check(torch.tensor(other[name]), torch.tensor(found[0][name]))
    assert found[0]["eval_kl/reverse/k3/per_token/standard_error"] > 0


def test_nothing_live_moves_no_beta(tmp_path):
    trainer = made(tmp_path, kl_target=1.0, max_steps=1)
    score = trainer._generate_and_score_completions
    masked = lambda batch: {**batch, "completion_mask": torch.zeros_like(batch["completion_mask"])}
    trainer._generate_and_score_completions = lambda inputs: masked(score(inputs))  # as TRL masks those that were cut
    trainer.train()
    assert tiny.logged(trainer, "length/mean") == [0.0]
    assert trainer.coefficient.value == 0.05


def test_teacher_and_student_of_different_sizes(tmp_path):
    """Distillation: no reward, another model as reference, and the KL falls."""
    settings = {"kl_estimator": "exact", "kl_coef": 1.0, "kl_discount": 0.0, "kl_reduction": "sequence"}
    settings |= {"reward_funcs": None, "teacher": tiny.folder(layers=1, hidden=64)}
    trainer = made(tmp_path, max_steps=12, learning_rate=3e-2, **settings)
    assert trainer.ref_model.config.hidden_size == 64
    assert trainer.model.config.hidden_size == 32
    assert trainer.model.config._name_or_path == tiny.folder()
    trainer.train()
    kl = tiny.logged(trainer, "kl/reverse/exact/per_token")
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])


@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_a_head_may_be_padded(estimator, tmp_path):
    """As in families whose sizes round the vocabulary up differently; the entries beyond are nobody's."""
    common = {"reward_funcs": None, "kl_estimator": estimator, "kl_coef": 1.0, "max_steps": 1}
    trainer = made(tmp_path, teacher=tiny.folder(words=40), **common)
    assert (trainer.scorer.vocabulary, trainer.model.config.vocab_size) == (32, 32)
    trainer.train()
    assert tiny.logged(trainer, "kl/reverse/k3/per_token")[0] > 0


@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_adapters(estimator, tmp_path):
    """The reference is the model without them: the KL starts at 0, grows, and only adapters move."""
    from peft import LoraConfig

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    trainer = made(tmp_path, kl_estimator=estimator, peft_config=adapters, learning_rate=1e-1)
    assert trainer.ref_model is None
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    kl = tiny.logged(trainer, "kl/reverse/k3/per_token")
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[-1] > 1e-4
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora" in name for name in moved)


def test_a_reference_that_follows(tmp_path):
    """TRL's own: by half at every second update."""
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    trainer = made(tmp_path, max_steps=2, **moving)
    start = [p.detach().clone() for p in trainer.ref_model.parameters()]
    trainer.train()
    for ref, own, first in zip(trainer.ref_model.parameters(), trainer.model.parameters(), start, strict=True):
        SINGLE.check(ref, (own + first) / 2)


def test_what_compares_completions_needs_them_in_its_micro_batches(tmp_path):
    with pytest.raises(MeaningError, match="no peers there"):
        made(tmp_path, kl_baseline="leave_one_out", per_device_train_batch_size=1, gradient_accumulation_steps=8)
    with pytest.raises(MeaningError, match="micro-batches of whole groups of 4 completions"):
        made(tmp_path, kl_cell="k1-reward-group-std", per_device_train_batch_size=2, gradient_accumulation_steps=4)


def test_the_config_is_left_as_it_was(tmp_path):
    settings = {**tiny.SETTINGS, "kl_placement": "reward", "scale_rewards": "none"}
    args = KLConfig(str(tmp_path), **settings)
    for _ in range(2):
        trainer = KLTrainer(tiny.folder(), tiny.reward, args, train_dataset=tiny.prompts())
        assert trainer.reward_weights.tolist() == pytest.approx([1.0, -0.05])
    assert args.reward_weights is None


def test_a_kl_that_does_not_start_at_zero_is_told_of(tmp_path):
    trainer = made(tmp_path, max_steps=1)
    tiny.move_reference(trainer)
    with pytest.warns(UserWarning, match="not about 0.*another checkpoint"):
        trainer.train()


def test_what_is_logged(tmp_path):
    last = trained(tmp_path, kl_estimator="exact", max_steps=2).state.log_history[-2]
    names = {f"kl/reverse/{kind}/per_{unit}" for kind in ("k1", "k2", "k3", "exact") for unit in ("token", "sequence")}
    assert {*names, *(f"{name}/standard_error" for name in names), "kl/coef", "length/mean", "entropy"} <= set(last)


@pytest.mark.parametrize(
    ("kl", "length", "times"),
    [(1.0, 3.0, 1), (1.0, 5.0, 0), (3.0, 3.0, 0)],
    ids=["both fall", "lengths hold", "the KL rises"],
)
def test_completions_that_collapse_while_the_kl_falls_are_warned_of_once(kl, length, times, tmp_path):
    """The rows of a run that is resumed are those of its state."""
    trainer = made(tmp_path)
    trainer.state.log_history = [{"loss": 0.0}, {LENGTH: 8.0, KL: 2.0, "step": 1}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.log({LENGTH: length, KL: kl})
            trainer.log({"loss": 0.0})
    told = [str(each.message) for each in caught if "have shrunk from 8 to 3 tokens" in str(each.message)]
    assert len(told) == times


def test_nobody_is_left_alone():
    groups = [[0, 0, 1, 1], [0, 0, 1, 2], [0, 0, 0, 1], [7], [4, 5]]
    merged = [merge_lone_rows(torch.tensor(group)).tolist() for group in groups]
    assert merged == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [7], [4, 4]]


def test_a_prompt_has_one_key_however_it_is_padded():
    ids = torch.tensor([[0, 0, 7, 3], [0, 0, 3, 7], [0, 5, 7, 3]])
    keys = prompt_keys({"prompt_ids": ids, "prompt_mask": (ids > 0).long()})
    alone = prompt_keys({"prompt_ids": ids[:1, 2:], "prompt_mask": torch.ones(1, 2).long()})
    assert keys[0] == alone[0]
    assert len(set(keys.tolist())) == 3


def test_prompts_are_shuffled_whole():
    torch.manual_seed(0)
    group = torch.arange(12) // 3
    orders = []
    for _ in range(5):
        found = shuffle_groups({"group": group, "row": torch.arange(12), "name": list(range(12)), "one": None})
        assert found["row"].tolist() == found["name"]
        assert sorted(found["name"]) == list(range(12))
        assert all(len(set(found["group"][i : i + 3].tolist())) == 1 for i in range(0, 12, 3))
        orders.append(tuple(found["name"]))
    assert len(set(orders)) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_baseline": "leave_one_out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        {"kl_cell": "k1-reward-leave-one-out", "gradient_accumulation_steps": 2, "kl_reduction": "sequence"},
    ],
)
def test_each_micro_batch_has_whole_groups(tmp_path, settings):
    groups, trainer = [], made(tmp_path, **settings)
    loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: groups.append(inputs["group"].tolist()) or loss(model, inputs)
    trainer.train()
    for group in groups:
        assert all(group.count(number) == trainer.num_generations for number in set(group))


# Rewards beside the KL


def reward_model():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=len(tiny.WORDS), **{"num_labels": 1, **shape}))


@pytest.mark.parametrize("listed", [False, True])
def test_a_reward_model_with_its_tokenizer_beside_a_kl_in_the_reward(tmp_path, listed):
    tokenizer = [tiny.tokenizer()] if listed else tiny.tokenizer()
    make = partial(KLTrainer, reward_processing_classes=tokenizer)
    trainer = tiny.trainer(make, KLConfig, tmp_path, reward_funcs=reward_model(), kl_placement="reward", max_steps=1)
    assert trainer.reward_processing_classes == [tiny.tokenizer(), None]
    trainer.train()
    assert tiny.logged(trainer, "rewards/kl_to_reference/mean")


def test_what_no_reward_scores_is_reported_by_trl_beside_a_kl_in_the_reward(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.logger.warning", told.append)
    none = lambda completions, **_: [None] * len(completions)
    trained(tmp_path, reward_funcs=none, kl_placement="reward", max_steps=1)
    assert [text for text in told if "All reward functions returned None" in text]


class Game:
    """An environment with a tool and a reward of its own."""

    def reset(self, **_):
        return ""

    def step(self, move: str) -> str:
        """Make a move.

        Args:
            move: any.
        """
        return move

    def get_reward(self) -> float:
        return 2.0


def in_a_game(path, **settings) -> Any:
    """A trainer whose reward is the environment's, with a chat template that renders no tool: none is called here."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.grpo_trainer.supports_tool_calling", lambda *_: True)
        patch.setattr("trl.trainer.grpo_trainer.add_response_schema", lambda x: x)
        patch.setattr("trl.trainer.grpo_trainer.get_training_chat_template", lambda *_, **__: None)
        make = partial(KLTrainer, environment_factory=Game)
        return tiny.trainer(make, KLConfig, path, reward_funcs=None, processing_class=tokenizer, **settings)


@pytest.mark.parametrize(("placement", "names"), [("loss", ["Game"]), ("reward", ["kl_to_reference", "Game"])])
def test_an_environment_that_owns_its_reward_has_no_other(tmp_path, placement, names):
    trainer = in_a_game(tmp_path, kl_placement=placement)
    assert trainer.reward_func_names == names
    assert len(trainer.reward_funcs) == len(trainer.reward_processing_classes) == len(names)
    SINGLE.check(trainer.reward_weights, torch.tensor([-0.05, 1.0][-len(names) :]))


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_weights_are_for_the_rewards_that_were_given(tmp_path, placement):
    with pytest.raises(MeaningError, match=r"expected 0 `reward_weights`.*received 1; .*leave them out"):
        in_a_game(tmp_path, reward_weights=[2.0], kl_placement=placement)
    with pytest.raises(MeaningError, match=r"expected 1 `reward_weights`.*received 2; .*one for each"):
        made(tmp_path, reward_weights=[2.0, 1.0], kl_placement=placement)


# A model that was built in memory


@pytest.mark.parametrize("settings", [{}, {"kl_placement": "reward"}, {"kl_estimator": "exact"}], ids=str)
def test_a_model_without_a_name_trains_without_a_kl(tmp_path, settings):
    stock = tiny.trained(GRPOTrainer, GRPOConfig, tmp_path / "trl", model=nameless(), max_steps=2)
    ours = made(tmp_path / "ours", model=nameless(), max_steps=2, kl_coef=0.0, scale_rewards="group", **settings)
    assert ours.ref_model is None
    ours.train()
    assert torch.equal(tiny.weights(ours), tiny.weights(stock))
    with pytest.raises(MeaningError, match=r"a model object without one; remedy: save it by model.save_pretrained"):
        made(tmp_path / "ours", model=nameless(), **settings)


def nameless() -> Any:
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(tiny.folder())
    found.config._name_or_path = ""
    return found


# The KL under TRL's name; that it is TRL's value is in `test_against_trl.py`


@pytest.mark.parametrize(
    "settings", [{"kl_placement": "advantage"}, {"kl_placement": "reward"}, {"kl_cell": "k2-loss"}]
)
def test_the_kl_is_logged_wherever_it_is_placed(tmp_path, settings):
    found = trained(tmp_path, **settings)
    SINGLE.check(torch.tensor(tiny.logged(found, "kl")), torch.tensor(tiny.logged(found, "kl/reverse/k3/per_token")))
    assert len(tiny.logged(found, "kl")) == 3


# A trainer that resumes from a checkpoint continues the run, by `Trainer`'s own argument.

LOGGED = ("loss", "kl/coef", "kl/reverse/k3/per_token", "grad_norm")


def built(folder, **settings):
    return made(folder, kl_coef=0.05, max_steps=5, save_strategy="steps", save_steps=3, **settings)


def test_it_continues_as_if_it_had_not_stopped(tmp_path):
    """With an adapted β, completions that wait, and a generation that is used twice."""
    settings = {"kl_target": 1000.0, "kl_horizon": 1, "rollout_lag": 2, "num_iterations": 2, "kl_ratio": "prefix"}
    whole = built(tmp_path, **settings)
    whole.train()
    resumed = built(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name in LOGGED:
        assert tiny.logged(resumed, name) == pytest.approx(tiny.logged(whole, name), rel=1e-5)
    SAME_STEPS.check(tiny.weights(resumed), tiny.weights(whole))


def test_a_checkpoint_of_another_trainer_is_resumed_with_a_warning(tmp_path):
    built(tmp_path, kl_target=1000.0, kl_horizon=1).train()
    checkpoint = tmp_path / "checkpoint-3"
    for file in checkpoint.glob("klgrad_*"):
        file.unlink()
    resumed = built(tmp_path, kl_target=1000.0, kl_horizon=1)
    with pytest.warns(UserWarning, match=r"will start again with kl_coef.*a checkpoint of 1 processes"):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert tiny.logged(resumed, "kl/coef")[3] == 0.05


class Odd:
    """A part whose state is no plain data."""

    def state_dict(self):
        return {"image": object()}

    def load_state_dict(self, state):
        raise AssertionError("there is nothing to load")


def test_a_state_that_cannot_be_loaded_is_resumed_with_a_warning(tmp_path):
    trainer = built(tmp_path)
    trainer.checkpointed = {**trainer.checkpointed, "odd": Odd()}
    trainer.train()
    with pytest.warns(UserWarning, match="will start again with kl_coef"):
        built(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
