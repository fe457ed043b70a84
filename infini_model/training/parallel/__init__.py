"""Several processes training one model: groups, and sharded parameters."""
