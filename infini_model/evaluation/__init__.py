"""Evaluation of a trained model: loss, perplexity, samples and the report."""
