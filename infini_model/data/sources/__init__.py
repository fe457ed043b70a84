"""From `data.source` to documents on disk, known by their content."""
