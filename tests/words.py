"""The words of small documents."""

WORDS = ("river", "stone", "light", "under", "seven", "quiet", "glass", "morning", "copper")
