"""The stages as Prefect tasks: retries, timeouts, failures and artifacts."""
