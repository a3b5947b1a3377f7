"""The loop that answers: passes, rounds led by the host, and the protocol that text above it uses."""
