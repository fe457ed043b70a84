"""From documents to a dataset folder of memory-mapped token shards."""
