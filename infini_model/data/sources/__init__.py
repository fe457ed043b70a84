"""From `data.source` to documents on disk, identified by content."""
