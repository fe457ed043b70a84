"""From a dataset folder to batches of windows, in an order that a seed decides."""
