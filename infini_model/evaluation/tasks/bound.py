"""The bound of the negative log-likelihood that a model of masked diffusion has."""

from __future__ import annotations

from torch import Tensor

from infini_model.evaluation.context import HELD_OUT, EvalContext
from infini_model.evaluation.statistics import QUANTILE, Interval
from infini_model.evaluation.task import EvaluationTask, TaskResult


class LikelihoodBound(EvaluationTask):
    """Estimates the bound on a held-out split by many draws of the noise for each window."""

    title = "Likelihood bound"

    def run(self, context: EvalContext) -> TaskResult:
        """Score the windows of the test split, or of validation if test is empty."""
        if context.config.training.objective == "causal":
            return TaskResult(section="The model is causal: its loss is the likelihood itself.")
        split = next((each for each in reversed(HELD_OUT) if context.sample_size(each)), None)
        if split is None:
            return TaskResult(section="There are no windows to score.")
        settings = context.config.evaluation.likelihood_bound
        scored = context.score_draws(split, settings.max_windows, settings.draws)
        bound, margin = interval(scored)
        of_windows = Interval(bound, bound - margin, bound + margin)
        found = (
            f"The negative log-likelihood of the {split} split is at most "
            f"**{bound:.4f} ± {margin:.4f}** nats per token"
        )
        return TaskResult.of(
            {f"evaluation/{split}_likelihood_bound": of_windows},
            section=(
                f"{found}, an interval of 95% over {len(scored):,} windows with "
                f"{settings.draws:,} draws of the noise each."
            ),
            summary=[f"{found}."],
            details={"bound": bound, "margin": margin, "windows": len(scored)},
        )


def interval(scored: Tensor) -> tuple[float, float]:
    """The loss per token and half the width of its interval, from sums and counts [windows, 2].

    The windows are a sample: the interval also covers how much they differ from each other. It is
    infinite for a single one.
    """
    sums, counts = scored.T
    mean = sums.sum() / counts.sum()
    count = len(scored)
    if count == 1:
        return float(mean), float("inf")
    residuals = sums - mean * counts
    deviation = (residuals.square().sum() * count / (count - 1)).sqrt()
    return float(mean), float(QUANTILE * deviation / counts.sum())
