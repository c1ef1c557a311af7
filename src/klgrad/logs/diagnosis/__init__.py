"""Why trainer and sampler disagree: evidence from log-probs, and the causes that fit it."""
