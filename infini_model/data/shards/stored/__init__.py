"""Shards that are objects of a store, read by ranges of bytes."""
