"""Training on TRL with the KL that was meant: `KLTrainer` and `KLConfig`."""

from .config import KLConfig as KLConfig
from .notes import MeaningWarning as MeaningWarning
from .trainer import KLTrainer as KLTrainer
