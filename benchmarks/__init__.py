"""Speed beside a peer in the same run: `make bench`, or one by `python -m benchmarks.NAME`.

`recall`, `passkey`, `memory_gain` and `uptrain` are not of `make bench`: they ask what a model
remembers, and take many minutes or hours; `orchestration` keeps starting `infini serve`.

They are modules, not scripts: as a script, `tokenize.py` would hide Python's own `tokenize`.
"""
