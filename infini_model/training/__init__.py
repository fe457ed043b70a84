"""What `torchrun -m infini_model.training` runs, and the launcher that starts it."""
