"""Text to token ids and back, on the CPU and on a GPU."""
