"""Comparison of runs: their settings, results and curves."""
