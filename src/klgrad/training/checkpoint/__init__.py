"""Checkpoints: which are complete, what they store, and the trainer that writes them."""
