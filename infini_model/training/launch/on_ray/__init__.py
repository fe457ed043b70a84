"""A training on the nodes of a Ray cluster: gangs of launchers, one a node."""
