"""The MLflow model: prompts in, continuations out.

MLflow stores a copy of this file with the model and runs it when the model is loaded ("models from
code"), so nothing is pickled. Only `infini_model.evaluation.mlflow` refers to it, as a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

from infini_model.config import Config, SampleConfig
from infini_model.data.tokenizers.load import load_saved
from infini_model.evaluation.prompt import continue_prompt
from infini_model.training.export import load_model


class TextModel(PythonModel):  # type: ignore[misc] # MLflow is not typed
    """Continues each prompt of a column, as `infini generate` does."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the tokenizer, and the weights onto the GPU with the most free memory, if any."""
        folder = Path(context.artifacts["model"])
        self._tokenizer = load_saved(folder, context.model_config["tokenizer"])
        training = {"precision": context.model_config["precision"]}
        self._model = load_model(folder, Config().updated(training=training))

    def predict(
        self,
        context: PythonModelContext,  # noqa: ARG002 - the signature is MLflow's
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> list[str]:
        """The continuation of each prompt; MLflow fills in the defaults of `params`."""
        given = dict(params or {})
        seed = given.pop("seed", 0)
        settings = SampleConfig().updated(**given)
        return [
            "".join(continue_prompt(self._model, self._tokenizer, prompt, settings, seed))
            for prompt in model_input["prompt"]
        ]


set_model(TextModel())
