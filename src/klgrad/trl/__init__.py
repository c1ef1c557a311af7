"""Training on TRL with a declared KL: `KLTrainer` and `KLConfig`.

Also `KLCallback`, which reports the KL of any run, and TRL's `DistillationTrainer` with the kernels of this package.
"""

from .callback import CallbackWarning as CallbackWarning, KLCallback as KLCallback
from .config import KLConfig as KLConfig, MeaningWarning as MeaningWarning
from .distillation import DistillationTrainer as DistillationTrainer
from .kl_trainer import KLTrainer as KLTrainer
