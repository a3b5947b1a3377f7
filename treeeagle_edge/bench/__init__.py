"""`treeeagle bench`: measures plain and tree decoding on the same prompts, and shows the result."""
