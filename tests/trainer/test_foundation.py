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


def test_trls_configuration_is_answered_with_its_kl(tmp_path):
    """TRL's KL is token by token, the default of `KLConfig` is not."""
    said = r"a KLConfig; received a GRPOConfig; .*beta=0.04, token by token, write kl_coef=0.04, kl_level='token'"
    with pytest.raises(MeaningError, match=said):
        tiny.trainer(KLTrainer, GRPOConfig, tmp_path, beta=0.04)


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
