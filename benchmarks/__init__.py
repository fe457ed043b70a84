"""Speed beside a peer in the same run: `make bench`, or one by `python -m benchmarks.NAME`.

`recall` is not of `make bench`: it asks what a model remembers, and takes about nine minutes.

They are modules, not scripts: as a script, `tokenize.py` would hide Python's own `tokenize`.
"""
