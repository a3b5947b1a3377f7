"""`treeeagle profile`: what is here, what fits and how fast it will be, checked before anything is loaded."""
