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

from infini_model.config import Config
from infini_model.data.tokenizers.load import load_saved
from infini_model.serving.model import Model
from infini_model.training.export import load_model


class TextModel(PythonModel):  # type: ignore[misc] # MLflow is not typed
    """Continues each prompt of a column, as `infini generate` does."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the tokenizer, and the weights onto the GPU with the most free memory, if any."""
        folder = Path(context.artifacts["model"])
        tokenizer = load_saved(folder, context.model_config["tokenizer"])
        training = {"precision": context.model_config["precision"]}
        self._model = Model(load_model(folder, Config().updated(training=training)), tokenizer)

    def predict(
        self,
        context: PythonModelContext,  # noqa: ARG002 - the signature is MLflow's
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> list[str]:
        """Continue each prompt; MLflow fills in the defaults of `params`."""
        return self._model.generate(list(model_input["prompt"]), **(params or {}))


set_model(TextModel())
