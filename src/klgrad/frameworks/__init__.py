"""Frameworks that can be audited; each has one module, and one recorded audit in `records`.

To add one, write its module with `FRAMEWORK`, name it here, and record its audit by `make frameworks`. Its functions
`subjects` and, if it has them, `policy_losses` and `read_config` import the framework, or nothing heavy: the names here
need neither torch nor a framework. `readers` has the configuration files of frameworks without advice.
"""

from . import (
    areal,
    art,
    axolotl,
    cosmos_rl,
    easydel,
    liger,
    llamafactory,
    maxtext,
    mlx_lm_lora,
    mlx_tune,
    ms_swift,
    openrlhf,
    readers,
    rlinf,
    skyrl,
    torchrl,
    transcribed,
    trinity,
    trl,
    tunix,
    twinkle,
    unsloth,
    verl,
)
from .framework import Default as Default, Framework as Framework, Recorded as Recorded, recorded as recorded

_MODULES = (
    *(trl, verl, openrlhf, skyrl, liger, ms_swift, unsloth, trinity),
    *(areal, rlinf, cosmos_rl, torchrl, axolotl, llamafactory, art, twinkle),
    *(tunix, maxtext, easydel, mlx_lm_lora, mlx_tune),
)

FRAMEWORKS = {
    framework.name: framework for framework in (*(module.FRAMEWORK for module in _MODULES), *transcribed.FRAMEWORKS)
}
DEFAULTS = {name: framework.default for name, framework in FRAMEWORKS.items()}
"""What each framework descends with its default settings, with the KL switched on where it is off by default."""

SETTINGS = {name: framework.settings for name, framework in FRAMEWORKS.items() if framework.settings}
HOMES = {name: framework.home for name, framework in FRAMEWORKS.items() if framework.home}
READERS = readers.READERS | {name: framework.reader for name, framework in FRAMEWORKS.items() if framework.reader}
"""The advice and the readers, by framework."""
