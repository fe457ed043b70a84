"""Fast implementations of the model's operators, and the choice of attention backend."""
