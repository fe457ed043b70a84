"""Retrieval: what is hidden far back in a long context is asked for at its end."""
