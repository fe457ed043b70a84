"""The fast paths of the model's operators, and the choice of backend."""
