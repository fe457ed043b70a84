"""What watches a training: metrics, records, diagnostics, signs of life."""
