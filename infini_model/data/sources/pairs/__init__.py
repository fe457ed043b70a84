"""Rows that are a prompt and its answer."""
