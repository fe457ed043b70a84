"""From documents to batches: sources, tokenizers, shards, windows, loader."""
