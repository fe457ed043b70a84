"""Training on several processes: process groups and sharded parameters."""
