"""Kernel backends behind one dispatch point; `reference` is the definition every other backend is tested against."""
