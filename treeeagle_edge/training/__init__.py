"""Trains a draft head for a target: the target writes dialogues, the head learns from them, and is saved."""
