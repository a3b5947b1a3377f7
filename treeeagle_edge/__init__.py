"""TreeEagle Edge: chat with a local model, answered by EAGLE-3 tree speculative decoding."""

__version__ = "0.1.0"
