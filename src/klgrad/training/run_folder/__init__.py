"""The output folder of a run: its files, its lock, and the run that it replaces."""
