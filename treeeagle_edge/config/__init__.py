"""What config.json or the metadata of a GGUF file says of a model."""
