"""What a report says of a grid of answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from infini_model.config.evaluation import PasskeyConfig
from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.retrieval.grid import Counts, measure
from infini_model.evaluation.retrieval.heat_map import plot_heat_map
from infini_model.evaluation.statistics import Interval, wilson
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import Picture, TaskResult

NEEDS_CAUSAL = "Not measured: the questions are for a causal model, which continues a text."
# Shares of right answers: from the first on a length is remembered, up to the second it is not.
FOUND, LOST = 0.95, 0.5


def findings(
    subject: Subject, task: str, title: str, settings: PasskeyConfig, needles: int
) -> TaskResult:
    """Measure the grid of a task and write what was found."""
    if subject.model.config.bidirectional:
        return TaskResult(section=NEEDS_CAUSAL)
    context = subject.config.packing.context_length
    measured = measure(subject, task, settings, needles)
    exact = {
        length: wilson(int(each.exact.sum()), int(each.answers.sum()))
        for length, each in measured.items()
    }
    metrics, intervals = {}, {}
    for length, each in measured.items():
        found_by_name = {"exact_match": exact[length], "token_accuracy": token_accuracy(each)}
        for name, found in found_by_name.items():
            metric = f"evaluation/{task}_{name}/{length * context}"
            metrics[metric], intervals[metric] = found.estimate, (found.low, found.high)
    picture = plot_heat_map(
        np.stack([each.exact / each.answers for each in measured.values()], axis=1),
        [f"{length * context:,}\n{length} x trained" for length in measured],
        settings.depths,
        subject.plots_dir / f"{task}.png",
        title=title,
        trained=sum(length <= 1 for length in measured),
    )
    return TaskResult(
        metrics=metrics,
        intervals=intervals,
        section=_section(subject, settings, needles, measured, exact),
        summary=[_summary(title, exact, context)],
        advice=_advice(subject, task, exact),
        pictures=[Picture(path=picture, caption=f"{title} found, by length and depth")],
        details={
            "depths": settings.depths,
            "lengths": {
                str(length * context): {name: x.tolist() for name, x in each._asdict().items()}
                for length, each in measured.items()
            },
        },
    )


def token_accuracy(counts: Counts) -> Interval:
    """The share of right tokens; the sample is of answers, whose tokens depend on each other."""
    answers = int(counts.answers.sum())
    return wilson(answers * float(counts.right.sum() / counts.tokens.sum()), answers)


def _section(
    subject: Subject,
    settings: PasskeyConfig,
    needles: int,
    measured: Mapping[int, Counts],
    exact: Mapping[int, Interval],
) -> str:
    context = subject.config.packing.context_length
    rows = []
    for length, each in measured.items():
        by_depth = each.exact / each.answers
        worst = int(by_depth.argmin())
        rows.append(
            (
                f"{length * context:,} ({length} x)",
                percent(exact[length]),
                percent(token_accuracy(each)),
                f"{by_depth[worst]:.0%} at {settings.depths[worst]:g}%",
                f"{each.answers.sum():,}",
            )
        )
    hidden = "A number is" if needles == 1 else f"{needles} numbers are"
    filler = {
        "repeated": "five sentences that repeat",
        "random": "random sentences",
        "documents": "documents of the test split",
    }[settings.filler]
    keys = 9 * 10 ** (settings.digits - 1)
    parts = [
        f"{hidden} hidden in {filler} and asked for at the end. The model was trained on windows "
        f"of {context:,} tokens; a guess is right once in {keys:,} times.",
        table(
            ("Tokens", "Whole answer right", "Tokens right", "Worst depth", "Answers"),
            rows,
        ),
        "Intervals are of 95%. A token is right if it is the likeliest after the question and the "
        "tokens of the answer before it, so a whole answer is right if greedy generation gives it.",
    ]
    if subject.model.config.memory == "none":
        parts.append("The model has no memory: it sees only the segment of the question.")
    return "\n\n".join(parts)


def percent(found: Interval) -> str:
    """`97.1% (94.6 to 98.5)`."""
    return f"{100 * found.estimate:.1f}% ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _summary(title: str, exact: Mapping[int, Interval], context: int) -> str:
    found = [
        f"{percent(each)} at {length * context:,} tokens ({length} x the trained context)"
        for length, each in exact.items()
    ]
    return f"{title}: the model finds {', '.join(found)}."


def _advice(subject: Subject, task: str, exact: Mapping[int, Interval]) -> list[str]:
    """What to do if not everything is found."""
    shortest, *_ = exact
    lost = [length for length, found in exact.items() if found.estimate < FOUND]
    if not lost:
        return []
    if subject.model.config.memory == "none":
        return [
            "The model has no memory and finds nothing beyond a segment: train with "
            "`model.memory=linear`."
        ]
    if exact[shortest].estimate < LOST:
        return [
            f"Few needles of `{task}` are found at any length, as is usual for a model whose "
            "training never asked for what stood far back: include such text in the training "
            "data before judging the memory by it."
        ]
    return [
        f"Needles of `{task}` get lost from {lost[0]} x the trained context on: train on longer "
        "windows (`packing.context_length`)."
    ]
