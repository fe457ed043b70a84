"""The program `torchrun -m infini_model.training`, and the launcher that starts it."""

# Environment variable: the process id of the agent that started the ranks.
AGENT = "INFINI_AGENT_PID"
