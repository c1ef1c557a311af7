"""Training on TRL with the KL that was meant: `KLTrainer` and `KLConfig`."""

from .config import KLConfig as KLConfig
from .trainer import KLTrainer as KLTrainer
