"""The mathematics: tensors in, tensors out. Needs torch alone, and no other folder of this package."""
