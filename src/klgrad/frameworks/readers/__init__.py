"""Readers of the configuration files of frameworks that are audited by transcribed formulae, or not at all.

Each module has the names and defaults of the settings that matter, read in the framework's source at the version that
its `READER` states, and builds the KLs of a run by the formulae of `formulae`. Nothing here needs torch until a KL is
built.
"""

from . import areal, axolotl, nemo_rl, prime_rl, slime, swift, tunix

READERS = {
    "slime": slime.READER,
    "nemo-rl": nemo_rl.READER,
    "areal": areal.READER,
    "axolotl": axolotl.READER,
    "tunix": tunix.READER,
    "maxtext": tunix.MAXTEXT,
    "prime-rl": prime_rl.READER,
    "ms-swift": swift.READER,
}
