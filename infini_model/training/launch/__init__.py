"""Start the ranks of a training, and recover from their failures."""
