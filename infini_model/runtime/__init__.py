"""Files, processes and run folders: shared by all other packages."""
