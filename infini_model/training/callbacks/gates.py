"""How much of each layer's attention comes from the memory."""

from __future__ import annotations

from infini_model.model.llama import InfiniLlama
from infini_model.training.callbacks.callback import Callback, Step
from infini_model.training.parallel.sharding import gathered


class GateStatistics(Callback):
    """Records sigmoid(gate) over the heads of each layer, at every logged step."""

    def __init__(self, model: InfiniLlama) -> None:
        self._model = model

    def metrics(self, step: Step, seconds: float) -> dict[str, float]:  # noqa: ARG002
        """`memory/layer_N/gate_mean`, `gate_min` and `gate_max`."""
        if not step.logged:
            return {}
        values: dict[str, float] = {}
        for layer, gate in enumerate(self._model.gate_statistics(gathered)):
            values |= {
                f"memory/layer_{layer}/gate_mean": gate.mean,
                f"memory/layer_{layer}/gate_min": gate.minimum,
                f"memory/layer_{layer}/gate_max": gate.maximum,
            }
        return values
