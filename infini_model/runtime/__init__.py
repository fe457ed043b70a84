"""Files, processes and run folders: what every other room may use."""
