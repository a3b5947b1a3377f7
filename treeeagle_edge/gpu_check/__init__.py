"""`treeeagle gpu-check`: the CUDA path checked and measured on a card, section by section."""
