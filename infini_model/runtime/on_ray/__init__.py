"""Ray clusters: joining one, and what its nodes must have in common with this machine."""
