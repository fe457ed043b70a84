"""Presets and work-pool templates."""
