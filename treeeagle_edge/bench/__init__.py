"""`treeeagle bench`: plain and tree decoding measured in turn, and what is shown of it."""
