"""Repositories of the Hugging Face hub: looked up, fetched, checked, and found in its local cache."""
