"""The stages as Prefect tasks: what is retried, cached, timed out and shown."""
