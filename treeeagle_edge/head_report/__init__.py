"""`treeeagle eval-head`: counts how good a draft head is for its target, and shows the result."""
