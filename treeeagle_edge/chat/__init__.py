"""A conversation: messages to prompt ids, ids to text, answers, and their history on disk."""
