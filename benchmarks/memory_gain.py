"""What the memory is worth on text: the loss of long documents against controls without one.

Each run trains a small model on whole documents, in windows of 32 segments of 32 tokens, and
differs from the others in its form of attention alone (`benchmarks.memory_forms`). The controls are
`none`, which sees one segment at a time; `segment before`, which sees one more; `window`, which
sees as many tokens as make a state as large as the memory's, and `window of 128`, as large as that
of `residual + window`; and `plain`, which sees the whole window. `gated delta + window` is Gated
DeltaNet beside the same window (`benchmarks.gated_delta`). What counts is the loss of held-out
documents beyond their first 8 segments, where only a memory or a window tells what came before.

The corpus is `code`, the standard library, each module a document; or `text`, manuals of Debian
packages (`benchmarks.natural_text`); or, with --text, a file that is cut at blank lines into
documents of 4 kB. --times 4 trains on four times the tokens. --precision bf16 computes products in
bfloat16, with torch.compile.

A run takes 4 to 6 minutes on a free core at --times 1, and there are as many at once as there are
cores. Each one that is finished is a line of --results, and is not run again; one that was
interrupted goes on from its checkpoint in --folder. --show prints what the results hold, and trains
nothing. Intervals of 95% are over documents, of losses that are averaged over the seeds. Exits with
status 1 if a residual memory does worse than none, unless with --show.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.finished_runs import FinishedRuns
from benchmarks.memory_forms import FORMS, SEGMENT, WINDOW
from benchmarks.memory_trial import NEAR, common_key, folder_name, train_and_score
from benchmarks.natural_text import natural_text
from benchmarks.report import Cell, Ratio, publish, spread
from flows.presets import configure
from infini_model.config import Config
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources
from infini_model.evaluation.plots import plot_by_position
from infini_model.evaluation.statistics import Interval, bootstrap

STEPS = 1200
BLOCK_BYTES = 4_000
SETTINGS: dict[str, Any] = {
    "data": {
        "tokenizer": {"spec": "train", "vocab_size": 2048},
        "splits": {"train": 0.88, "validation": 0.02, "test": 0.1},
    },
    # Each document by itself: what the memory gains is not measured across documents.
    "packing": {"mode": "aligned", "remainder": "pad", "context_length": WINDOW},
    "model": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "segment_length": SEGMENT,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "training": {
        "batch_size": 2,
        "warmup_steps": 60,
        "learning_rate": 3e-3,
        "memory_learning_rate": 3e-2,
    },
    "tracking": {"mlflow": False, "tensorboard": False},
    "logging": {"eval_steps": 1_000_000},
    "evaluation": {"loss_by_position": {"max_documents": 128}},
}
BASE, CONTROL, MEMORY, PAIR = "none", "window", "residual", "residual + window"
WIDE = "window of 128"
USUAL = (
    *(BASE, CONTROL, f"{CONTROL} without sinks", WIDE, f"{WIDE} without sinks", "plain"),
    *(MEMORY, PAIR, "segment before", "gated delta + window"),
)
DRAWN = (BASE, WIDE, "plain", MEMORY, PAIR)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"training": {"precision": "bf16"}, "launch": {"compile": True}},
}


class Trial(NamedTuple):
    """What is trained: `times` multiplies the steps."""

    corpus: str
    times: int
    form: str
    seed: int
    precision: str = "fp32"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_gain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(USUAL), metavar="NAME")
    parser.add_argument("--times", type=int, default=1, help=f"multiplies {STEPS:,} steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    corpus = parser.add_mutually_exclusive_group()
    corpus.add_argument("--corpus", choices=("code", "text"), default="code")
    corpus.add_argument("--text", type=Path, help="a file to train on, in place of a corpus")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="print the results, train nothing")
    parser.add_argument("--plot", type=Path, help="draw the losses by position, as PNG")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "memory_gain.jsonl"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs", "memory-gain"))
    parser.add_argument(
        "overrides", nargs="*", help="settings of every run, as model.num_hidden_layers=4"
    )
    return parser.parse_args()


def settings(options: argparse.Namespace, trial: Trial) -> Config:
    """The quickstart with `SETTINGS` and those of the form."""
    steps = trial.times * options.steps
    source: dict[str, Any] = {"data": {"name": trial.corpus}}
    if options.text is not None:
        source["data"]["source"] = {"paths": [str(_blocks(options.text, options.folder))]}
    elif options.corpus == "text":
        source["data"]["source"] = {"paths": [str(natural_text(options.folder / "text"))]}
    return configure(
        ["quickstart"],
        overrides=[
            SETTINGS,
            source,
            {"run": {"output_dir": str(options.folder), "seed": trial.seed}},
            {"training": {"max_steps": steps}, "checkpoint": {"save_steps": options.steps}},
            {"model": FORMS[trial.form].model},
            PRECISIONS[trial.precision],
            *options.overrides,
        ],
    )


def _blocks(text: Path, folder: Path) -> Path:
    """Cut a text at blank lines into files of at least `BLOCK_BYTES`; returns their pattern."""
    blocks = folder / f"{text.stem}-blocks"
    if not blocks.exists():
        blocks.mkdir(parents=True)
        paragraphs: list[str] = []
        numbers = itertools.count()
        for paragraph in text.read_text(encoding="utf-8").split("\n\n"):
            paragraphs.append(paragraph)
            if sum(map(len, paragraphs)) >= BLOCK_BYTES:
                path = blocks / f"{next(numbers):05d}.txt"
                path.write_text("\n\n".join(paragraphs), encoding="utf-8")
                paragraphs = []
    return blocks.resolve() / "*.txt"


def perform(options: argparse.Namespace, runs: FinishedRuns[Trial]) -> str:
    """Train and score what is missing; returns the key of the results."""
    corpus = options.corpus if options.text is None else options.text.stem
    chosen = dict.fromkeys([BASE, *options.forms])
    # Runs to be compared are next to each other, so that an interruption leaves whole seeds.
    trials = [
        Trial(corpus, options.times, form, seed, options.precision)
        for seed in options.seeds
        for form in chosen
    ]
    config = settings(options, Trial(corpus, 1, BASE, 0))
    manifest = build_dataset(
        list_sources(config.data, options.folder), config.data, options.folder / "datasets"
    )
    dataset = (options.folder / "datasets" / manifest.folder_name).resolve()
    key = common_key(config, dataset)

    def perform_one(trial: Trial) -> dict[str, Any]:
        run_dir = options.folder / folder_name(trial, key)
        return train_and_score(trial.form, settings(options, trial), dataset, run_dir)

    runs.complete(key, trials, perform_one)
    return key


class Losses(NamedTuple):
    """Losses of a form by document, beyond the first segments, averaged over seeds.

    `sums` in nats and `counts` of targets, float64 [documents].
    """

    sums: np.ndarray
    counts: np.ndarray

    @property
    def mean(self) -> float:
        """The loss in nats per token."""
        return float(self.sums.sum() / self.counts.sum())

    def gain_over(self, other: Losses) -> Interval:
        """How much lower the loss per token is, on the same documents."""
        return bootstrap((other.sums - self.sums)[:, None], self.counts[:, None])[0]


def losses(results: Iterable[dict[str, Any]], kind: str = "fresh") -> Losses | None:
    """The losses of several seeds; None if the model has no such part to knock out."""
    by_document = [each["documents"] for each in results]
    if kind not in by_document[0]:
        return None
    return Losses(
        np.mean([each[kind] for each in by_document], axis=0), np.array(by_document[0]["counts"])
    )


def tabulate(
    done: dict[Trial, dict[str, Any]], width: int
) -> Iterator[tuple[dict[str, Cell], Ratio | None]]:
    """A row for each form of each corpus, length and precision, and its ratio to none by seed."""
    groups = dict.fromkeys(trial._replace(seed=0) for trial in done)
    for group in sorted(groups, key=lambda each: (each.corpus, each.times, each.precision)):
        ours = {trial.seed: done[trial] for trial in done if trial._replace(seed=0) == group}
        form, precision = group.form, "" if group.precision == "fp32" else f", {group.precision}"

        def paired(other: str) -> tuple[list[Any], list[Any]]:
            """The results of this form and of another with the same seeds."""
            theirs = {s: done.get(group._replace(form=other, seed=s)) for s in ours}  # noqa: B023
            both = [(ours[seed], each) for seed, each in theirs.items() if each is not None]  # noqa: B023
            return [a for a, _ in both], [b for _, b in both]

        def gain(other: str) -> str | None:
            if form == other or not (pair := paired(other))[0]:  # noqa: B023
                return None
            a, b = map(losses, pair)
            return None if a is None or b is None else str(a.gain_over(b))

        def worth(kind: str) -> str | None:
            """Return how much lower the loss is than with a part knocked out."""
            whole, out = losses(ours.values()), losses(ours.values(), kind)  # noqa: B023
            return None if whole is None or out is None else str(whole.gain_over(out))

        of_all = losses(ours.values())
        assert of_all is not None
        by_seed = [losses([each]) for each in ours.values()]
        about = FORMS[form]
        row: dict[str, Cell] = {
            "": f"{group.corpus}, {group.times}×{precision}, {form}",
            "seeds": ", ".join(map(str, ours)),
            "loss": ", ".join(f"{each.mean:.3f}" for each in by_seed if each),
            f"gain over {BASE}": gain(BASE),
            f"gain over {CONTROL}": gain(CONTROL),
            f"gain over {PAIR}": gain(PAIR),
            "worth of the memory": worth("knocked_out"),
            "of the window": worth("without_window"),
            "first segment": f"{first_segment(ours.values()):.3f}",
            "state": f"{about.state(width):,}",
            "KiB": f"{about.state_bytes(width) / 1024:.0f}",
            "parameters": next(iter(ours.values())).get("parameters"),
            "documents": len(of_all.counts),
        }
        ratios = None
        if form != BASE and (pair := paired(BASE))[0]:
            means = [[each.mean for x in side if (each := losses([x]))] for side in pair]
            ratios = spread([a / b for a, b in zip(*means, strict=True)])
        yield row, ratios


def first_segment(results: Iterable[dict[str, Any]]) -> float:
    """The loss of the first segments, where no form has anything older to see."""
    segments = [each["segments"] for each in results]
    return float(np.mean([each["fresh"][0] / each["counts"][0] for each in segments]))


def plot(done: dict[Trial, dict[str, Any]], options: argparse.Namespace) -> None:
    """Draw the losses of the pair, its memory and controls by segment, averaged over the seeds."""
    curves = {}
    for form in DRAWN:
        segments = [
            result["segments"]
            for trial, result in done.items()
            if (trial.times, trial.form, trial.precision)
            == (options.times, form, options.precision)
        ]
        if not segments:
            continue
        means = np.mean([np.divide(each["fresh"], each["counts"]) for each in segments], axis=0)
        curves[form] = ([*range(1, len(means) + 1)], means.tolist())
    position = f"segment of the document ({SETTINGS['model']['segment_length']} tokens each)"
    plot_by_position(curves, [], position, options.plot)


def show(runs: FinishedRuns[Trial], keys: Sequence[str], width: int) -> bool:
    """Print the results; returns whether residual memories, and windows with one, beat none."""
    if not keys:
        raise SystemExit("no finished runs")
    rows, ratios = [], {}
    for key in keys:
        for row, ratio in tabulate(runs.of(key), width):
            rows.append(row)
            if ratio is not None:
                ratios[str(row[""])] = ratio
    limits = {name: 1.0 for name in ratios if name.endswith((f", {MEMORY}", f", {PAIR}"))}
    heading = (
        f"Loss in nats per token beyond the first {NEAR} segments, and as a ratio of that without "
        "a memory; worth is what knocking a part out costs; state in numbers of a head and in KiB, "
        "where a window's are of 16 bits"
    )
    publish("memory_gain", heading, rows, ratios, limits=limits)
    return all(ratios[name].median <= limit for name, limit in limits.items())


def main() -> None:
    """Run the trials and print the results."""
    options = parse()
    options.folder = options.folder.resolve()
    torch.set_num_threads(1)
    runs = FinishedRuns(options.results, Trial)
    keys = runs.keys() if options.show else [perform(options, runs)]
    if options.plot is not None:
        plot(runs.of(keys[0]), options)
    width = settings(options, Trial("code", 1, BASE, 0)).model.head_dim
    if not show(runs, keys, width) and not options.show:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
