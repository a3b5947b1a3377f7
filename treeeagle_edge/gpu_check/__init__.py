"""`treeeagle gpu-check`: checks and measures the CUDA path on a card, section by section."""
