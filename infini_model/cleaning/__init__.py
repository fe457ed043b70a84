"""What nothing refers to any more: finding it, saying what it holds, removing it."""
