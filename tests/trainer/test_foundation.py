"""What a `KLTrainer` refuses to stand on."""

from functools import wraps

import pytest
import tiny
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from klgrad.errors import MeaningError
from klgrad.trl import KLConfig, KLTrainer
from klgrad.trl.compat import ContractError

pytestmark = pytest.mark.filterwarnings("ignore")

METHODS = ("compute_loss", "_compute_loss", "training_step", "_get_per_token_logps_and_entropies")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_method_that_is_not_trls_is_refused(name, wrapped, monkeypatch, tmp_path):
    """As by libraries that replace TRL's loss at run time; also where the replacement carries the old one's name."""
    real = getattr(GRPOTrainer, name)

    def replaced(self, *args, **kwargs):
        return real(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, name, wraps(real)(replaced) if wrapped else replaced)
    with pytest.raises(ContractError, match=rf"GRPOTrainer.{name} of TRL .*test_foundation.py.*leave it out"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


def test_a_base_class_that_is_not_trls_is_refused(monkeypatch, tmp_path):
    """A whole class in the place of TRL's, as a cache of compiled trainers has it."""
    source = "def _compute_loss(self, model, inputs): return 0.0"
    compiled = {}
    exec(compile(source, "unsloth_compiled_cache/UnslothGRPOTrainer.py", "exec"), compiled)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", compiled["_compute_loss"])
    with pytest.raises(ContractError, match=r"UnslothGRPOTrainer\.py"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


def test_trls_configuration_is_answered_with_what_to_write(tmp_path):
    with pytest.raises(MeaningError, match="a KLConfig; received a GRPOConfig") as raised:
        tiny.trainer(KLTrainer, GRPOConfig, tmp_path, beta=0.04, lr_scheduler_type="constant")
    assert "KLConfig(kl_coef=0.04, kl_level='token', output_dir=" in raised.value.remedy
    for field in ("num_generations=4", "learning_rate=0.01", "lr_scheduler_type='constant'", "bf16=False"):
        assert field in raised.value.remedy
    assert "steps_per_generation" not in raised.value.remedy


def test_what_to_write_can_be_written(tmp_path):
    with pytest.raises(MeaningError) as raised:
        tiny.trainer(KLTrainer, GRPOConfig, tmp_path)
    call = raised.value.remedy.removeprefix("write ").partition(", from klgrad.trl")[0]
    assert eval(call, {"KLConfig": KLConfig}).num_generations == 4


@pytest.mark.parametrize("args", ["runs/mine", {"output_dir": "runs/mine"}])
def test_what_is_no_configuration(args):
    with pytest.raises(MeaningError, match=f"a KLConfig; received a {type(args).__name__}"):
        KLTrainer(tiny.folder(), tiny.reward, args, train_dataset=tiny.prompts())


@pytest.mark.slow
def test_too_few_prompts_for_one_update(tmp_path):
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path)
    trainer.train_dataset = tiny.prompts(1)
    with pytest.raises(MeaningError, match=r"at least 2 prompts.*received 1; .*not one update would be made"):
        trainer.train()
