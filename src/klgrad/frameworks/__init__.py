"""Frameworks that can be audited; each has one recorded audit in `records`.

To add one, write its module with `FRAMEWORK`, name it here, and record its audit by `make frameworks`. Its functions
`subjects` and, if it has them, `policy_losses` and `read_config` import the framework, or nothing heavy: the names here
need neither torch nor a framework.
"""

from . import (
    areal,
    axolotl,
    easydel,
    functions,
    liger,
    maxtext,
    mlx,
    ms_swift,
    nemo_rl,
    openrlhf,
    prime_rl,
    rlinf,
    skyrl,
    slime,
    torchrl,
    transcribed,
    trl,
    tunix,
    twinkle,
    verl,
)
from .framework import Default as Default, Framework as Framework, Recorded as Recorded, recorded as recorded

_ALL = (
    *(module.FRAMEWORK for module in (trl, verl, openrlhf, skyrl, liger, ms_swift)),
    *(functions.UNSLOTH, functions.TRINITY, areal.FRAMEWORK, rlinf.FRAMEWORK, functions.COSMOS_RL, torchrl.FRAMEWORK),
    *(axolotl.FRAMEWORK, functions.LLAMAFACTORY, functions.ART, twinkle.FRAMEWORK),
    *(tunix.FRAMEWORK, maxtext.FRAMEWORK, easydel.FRAMEWORK, mlx.MLX_LM_LORA, mlx.MLX_TUNE),
    *(nemo_rl.FRAMEWORK, prime_rl.FRAMEWORK, slime.FRAMEWORK, slime.MILES, *transcribed.FRAMEWORKS),
)

FRAMEWORKS = {framework.name: framework for framework in _ALL}
DEFAULTS = {name: framework.default for name, framework in FRAMEWORKS.items()}
"""What each framework descends with its default settings, with the KL switched on where it is off by default."""

SETTINGS = {name: framework.settings for name, framework in FRAMEWORKS.items() if framework.settings}
HOMES = {name: framework.home for name, framework in FRAMEWORKS.items() if framework.home}
_READERS = {name: framework.reader for name, framework in FRAMEWORKS.items() if framework.reader}
# The first reader that knows a setting takes the file, and flags of old releases of OpenRLHF are slime's too.
READERS = dict(sorted(_READERS.items(), key=lambda pair: not pair[1].source))
"""The advice and the readers, by framework."""
