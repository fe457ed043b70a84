"""What `torchrun -m infini_model.training` runs, and the launcher that starts it."""

# The environment variable that tells the ranks who started them: their agent's process id.
AGENT = "INFINI_AGENT_PID"
