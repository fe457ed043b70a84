"""Partitions on a Ray cluster: joining it, the tasks, and what runs on its nodes."""
