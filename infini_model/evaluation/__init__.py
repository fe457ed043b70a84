"""What a trained model is worth: loss, perplexity, samples and the report."""
