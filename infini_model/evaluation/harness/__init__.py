"""EleutherAI's lm-evaluation-harness (`lm-eval`, optional) measures our models."""
