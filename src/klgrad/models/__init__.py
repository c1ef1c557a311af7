"""From the name of a language model to a folder that transformers loads; one model is embedded."""
