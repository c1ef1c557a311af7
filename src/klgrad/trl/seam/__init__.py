"""The seam to TRL: every private name of TRL, transformers and accelerate that this package uses is used here.

Each file begins with the names that it touches:

- `version.py`, `contract.py`, `loss_source.py`: refuse a TRL that this package was not written for, by its version, by
  where its methods come from, by their signatures, and by the source of its loss;
- `forward.py`: log-probs of completions, and an answer for TRL's loss from a pass that was already made;
- `loss.py`: adds a term to TRL's loss, and makes TRL build and score the reference (`beta`);
- `batch.py`: reads and changes a scored batch, by the keys that TRL's loss reads;
- `models.py`: finds, loads and gathers the policy and the reference;
- `generation.py`: samples, tokenizes, pads and shuffles completions;
- `observe.py`: observes a trainer of any kind from outside, for `KLCallback`;
- `state.py`: logs metrics, and holds the state that TRL's checkpoints leave out;
- `distillation.py`: TRL's distillation loss with another divergence;
- `checkpoints.py`: the files of a checkpoint.

Methods that have to be overridden are overridden in `kl_trainer.py`, `distillation.py` and
`training/checkpoint/run_trainer.py`; `contract.OVERRIDES` lists them. A test searches `trl/` and `training/` for
private names outside this package and that list.
"""
