"""Callbacks of the training loop: metrics, records, diagnostics, heartbeats."""
