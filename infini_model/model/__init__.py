"""The model: Llama with a compressive memory, its loss, generation, and checkpoints on disk."""
