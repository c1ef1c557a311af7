"""Training prompts, evaluation sets and reward functions."""
