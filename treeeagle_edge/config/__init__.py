"""A model's shapes and constants, read from config.json or from the metadata of a GGUF file."""
