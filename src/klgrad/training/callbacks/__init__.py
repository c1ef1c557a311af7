"""Trainer callbacks: progress and evaluation, stop signals, crash checkpoints, the first update of a new process."""
