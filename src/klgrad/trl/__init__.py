"""Training on TRL with a declared KL: `KLTrainer` and `KLConfig`; and `KLCallback`, which reports the KL of any run."""

from .callback import CallbackWarning as CallbackWarning, KLCallback as KLCallback
from .config import KLConfig as KLConfig
from .kl_trainer import KLTrainer as KLTrainer
from .meaning_notes import MeaningWarning as MeaningWarning
