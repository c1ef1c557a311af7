"""Finds out why trainer and sampler disagree: evidence from log-probs, and the causes that explain it."""
