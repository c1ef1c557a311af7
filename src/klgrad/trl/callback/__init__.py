"""`KLCallback`: the KL of any run of TRL or transformers, and the log-probs that `klgrad logs` reads."""

from .kl_callback import CallbackWarning as CallbackWarning, KLCallback as KLCallback
