"""Training on TRL with a declared KL: `KLTrainer` and `KLConfig`."""

from .config import KLConfig as KLConfig
from .kl_trainer import KLTrainer as KLTrainer
from .meaning_notes import MeaningWarning as MeaningWarning
