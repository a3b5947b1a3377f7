"""Tensors of a model on disk, in each of the formats that are read."""
