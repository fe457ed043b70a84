"""The sections of a report that no task writes, and the Markdown of all."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from infini_model.evaluation.subject import Subject
from infini_model.runtime.metrics_file import Line

# The share of a step that may be waiting for data.
MOST_WAITING = 0.01


def fenced(text: str) -> str:
    """`text` as a code block that nothing in it can close.

    Control characters, which could reach a terminal, become U+FFFD.
    """
    text = text.replace("\r\n", "\n")
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def model_section(subject: Subject) -> str:
    """What was trained, on what, and for how long."""
    model, config, manifest = subject.model, subject.config, subject.manifest
    position, shape = subject.position, subject.model.config
    parameters = sum(p.numel() for p in model.parameters())
    own = sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.endswith(("gate", "memory_key_shift"))
    )
    context = config.packing.context_length
    memory = {"none": "none (segments are apart)"}.get(
        shape.memory, f"{shape.memory}{', keys shifted' if shape.memory_key_shift else ''}"
    )
    dataset = f"`{manifest.name}`, key `{manifest.key[:16]}`, {manifest.tokens:,} tokens"
    if position.dataset_key != manifest.key:
        dataset += f" (trained on another, key `{position.dataset_key[:16]}`)"
    rows = [
        ("Parameters", f"{parameters:,}, of which {own:,} are the memory's gates and key shifts"),
        (
            "Shape",
            f"{shape.num_hidden_layers} layers of width {shape.hidden_size}, "
            f"{shape.num_attention_heads} query and {shape.key_value_heads} key-value heads, "
            f"feed-forward {shape.intermediate_size}, vocabulary {shape.vocab_size:,}",
        ),
        (
            "Context",
            f"{context:,} tokens in {context // shape.segment_length} segments of "
            f"{shape.segment_length:,}",
        ),
        ("Memory", memory),
        ("Dataset", dataset),
        ("Steps", f"{position.step:,} of {subject.last_step:,}"),
        ("Tokens read", f"{position.consumed * context:,}"),
        ("Seed", str(position.seed)),
    ]
    return table(("What was trained", ""), rows).replace("---:", "---")


def reproduce_section(run_dir: Path) -> str:
    """The commands that make this again."""
    config = shlex.quote(str(run_dir / "config.yaml"))
    name = shlex.quote(run_dir.name)
    return (
        "```sh\n"
        f"infini run --config {config} run.name={name}-again  # the same run once more\n"
        f"infini evaluate --config {config} run.name={name}  # this report once more\n"
        "```"
    )


def speed_section(lines: Sequence[Line]) -> str:
    """How fast the steps were, and whether the data kept up with them."""
    timed = [line for line in lines if line.get("train/step_seconds", 0.0) > 0.0]
    if not timed:
        return "No step was timed."
    rate = statistics.median(line["train/tokens_per_second"] for line in timed)
    waited = sum(line.get("train/data_wait_seconds", 0.0) for line in timed)
    share = waited / sum(line["train/step_seconds"] for line in timed)
    told = f"{rate:,.0f} tokens a second; {share:.2%} of the steps' time was waiting for data."
    if share <= MOST_WAITING:
        return told
    return (
        f"{told} That is over {MOST_WAITING:.0%}: put the dataset folder on a disk of this "
        "machine, leave memory free for the system to keep the shards in, and cores for the loader."
    )


def picture(caption: str, path: Path, run_dir: Path) -> str:
    """A plot, by its path relative to the report."""
    return f"![{caption}]({path.relative_to(run_dir).as_posix()})"
