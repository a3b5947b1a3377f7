"""What a run will need, from shapes alone, before anything is loaded: profile, memory plan, notes, alternatives."""
