"""The names of klgrad's trainers in `trainer.v1.trainer_mode`."""

MODES = ("sync", "colocate_async", "separate_async")
"""verl's own trainer modes."""

PREFIX = "klgrad_"
"""Before the name of the mode that a trainer of klgrad's is based on."""
