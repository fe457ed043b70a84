"""Starting the ranks of a training, and what happens when they fail."""
