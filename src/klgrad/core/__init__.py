"""The mathematics: tensors in, tensors out. It needs torch alone, and imports no other folder of this package."""
