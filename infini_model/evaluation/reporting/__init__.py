"""The report of an evaluation: Markdown, plots."""
