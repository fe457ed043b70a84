"""Where datasets are kept: a folder of this machine, or an object store that machines share."""
