"""Training on verl with a declared KL: settings under `klgrad`, and `trainer.v1.trainer_mode=klgrad_sync`.

verl loads `klgrad.verl.plugin` in every process. Nothing here is imported by hand.
"""
