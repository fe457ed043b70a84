"""The library that computes: model, data, training, evaluation. It knows nothing of Prefect."""
