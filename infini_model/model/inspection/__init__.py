"""What a model's memory contributes: by layer and head, with the weights as they are."""
