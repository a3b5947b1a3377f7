"""`treeeagle eval-head`: how good a draft head is for its target, counted and shown."""
