"""Settings of `klgrad train` and `klgrad distill`: declaration, presets, parsing."""
