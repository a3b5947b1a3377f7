"""Making a draft head for a target: data that the target writes, training, and what is saved."""
