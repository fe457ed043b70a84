"""Loading batches of windows from a dataset folder, in a seeded order."""
