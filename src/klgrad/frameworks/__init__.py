"""Frameworks that can be audited; each has one recorded audit in `records`.

To add one, write its module with `FRAMEWORK`, name it here and in `releases.toml`, and record its audit by
`make frameworks`. Its functions `subjects` and, if it has them, `policy_losses` and `read_config` import the framework,
or nothing heavy: the names here need neither torch nor a framework.
"""

from . import (
    areal,
    axolotl,
    easydel,
    functions,
    ms_swift,
    nemo_rl,
    openrlhf,
    rlinf,
    skyrl,
    slime,
    transcribed,
    trl,
    tunix,
    verl,
)
from .framework import Default as Default, Framework as Framework, advice
from .record import Recorded as Recorded, recorded as recorded

_ALL = (
    *(trl.FRAMEWORK, verl.FRAMEWORK, openrlhf.FRAMEWORK, skyrl.FRAMEWORK, functions.LIGER, ms_swift.FRAMEWORK),
    *(functions.UNSLOTH, functions.TRINITY, areal.FRAMEWORK, rlinf.FRAMEWORK, functions.COSMOS_RL, functions.TORCHRL),
    *(axolotl.FRAMEWORK, functions.LLAMAFACTORY, functions.ART, functions.TWINKLE),
    *(tunix.FRAMEWORK, tunix.MAXTEXT, easydel.FRAMEWORK, functions.MLX_LM_LORA, functions.MLX_TUNE),
    *(nemo_rl.FRAMEWORK, transcribed.PRIME_RL, slime.FRAMEWORK, slime.MILES, *transcribed.FRAMEWORKS),
)

FRAMEWORKS = {framework.name: framework for framework in _ALL}
DEFAULTS = {name: framework.default for name, framework in FRAMEWORKS.items()}
"""What each framework descends with its default settings, with the KL switched on where it is off by default."""

SETTINGS, HOMES = advice()
_READERS = {name: framework.reader for name, framework in FRAMEWORKS.items() if framework.reader}
# The first reader that knows a setting takes the file, and flags of old releases of OpenRLHF are slime's too.
READERS = dict(sorted(_READERS.items(), key=lambda pair: not pair[1].source))
"""The advice and the readers, by framework."""
