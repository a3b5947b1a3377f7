"""The KV memory: storage of slots, who owns them, and the sequence that reads them."""
