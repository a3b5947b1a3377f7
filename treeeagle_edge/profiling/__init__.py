"""`treeeagle profile`: what this machine has, what fits and how fast it will be, before anything is loaded."""
