"""The commands `klgrad train`, `klgrad distill` and `klgrad compare`, built on `klgrad.trl`.

Each file is one topic; `run.run` puts them together. This package needs `klgrad[train]`.
"""
