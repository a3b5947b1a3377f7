"""What this machine has: device, processor, memory, NVIDIA cards."""
