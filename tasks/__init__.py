"""The stages as Prefect tasks: retries, failures and artifacts."""
