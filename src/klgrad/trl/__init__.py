"""Training on TRL with the KL that was meant: `KLTrainer` and `KLConfig`."""

from .config import KLConfig as KLConfig
from .kl_trainer import KLTrainer as KLTrainer
from .meaning_notes import MeaningWarning as MeaningWarning
