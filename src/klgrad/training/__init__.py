"""The commands `klgrad train`, `klgrad distill` and `klgrad compare`, built on `klgrad.trl`.

Rooms:
    settings: command line, file and preset to checked settings.
    data: prompts to train and evaluate on, and the rewards that score completions.
    run_folder: the files of a run, its lock, and the run that it replaces.
    checkpoint: checkpoints that a run continues from without a difference.
    callbacks: what happens between updates: progress, evaluation, signals, crash checkpoints.
    output: what is printed and drawn: dry run, summary, figures, comparison.

`run.run` puts them together. This package needs `klgrad[train]`.
"""
