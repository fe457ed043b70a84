"""The bound of the negative log-likelihood that a model of masked diffusion has."""

from __future__ import annotations

from infini_model.evaluation.context import HELD_OUT, EvalContext
from infini_model.evaluation.statistics import bootstrap
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
        # The windows are the sample: the interval also covers how much they differ.
        (bound,) = bootstrap(scored[:, :1], scored[:, 1:])
        found = (
            f"The negative log-likelihood of the {split} split is at most **{bound}** nats per "
            "token"
        )
        return TaskResult.of(
            {f"evaluation/{split}_likelihood_bound": bound},
            section=(
                f"{found}, an interval of 95% over {len(scored):,} windows with "
                f"{settings.draws:,} draws of the noise each."
            ),
            summary=[f"{found}."],
        )
