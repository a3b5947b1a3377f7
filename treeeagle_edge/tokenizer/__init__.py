"""Text to ids and back, from each of the forms in which a checkpoint holds its vocabulary."""
