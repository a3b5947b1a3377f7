"""How a draft tree grows, and how large each round's tree should be."""
