"""The library that computes: model, data, training, evaluation. It knows nothing of Prefect.

Settings that libraries beneath read when they are first imported are made here, unless the
environment has them already: nothing phones home; the threads of torch's operators sleep while they
wait for each other, since spinning, which is the default, makes a training several times slower as
soon as another process wants the same cores; and torch asks Linux for large pages, since attention
over 16K tokens on a CPU spends a tenth of its time on having small ones mapped. Where there is a
proxy, no request to this machine goes through it, here and in all children.

What users import is `__all__`. Each name is loaded when it is first asked for, so that importing
the package costs no torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infini_model.config import load_config as load_config
    from infini_model.data.loading.gpu import get_gpu_train_dataloader as get_gpu_train_dataloader
    from infini_model.data.loading.gpu import gpu_clm_process as gpu_clm_process
    from infini_model.data.tokenizers.load import load_tokenizer as load_tokenizer
    from infini_model.model.attention import infini_attention as infini_attention
    from infini_model.model.generate import generate as generate
    from infini_model.model.llama import InfiniLlama as InfiniLlama
    from infini_model.model.memory import Memory as Memory
    from infini_model.objectives.causal import GPUDataCollatorForCLM as GPUDataCollatorForCLM
    from infini_model.serving.model import Conversation as Conversation
    from infini_model.serving.model import Model as Model

_MODULES = {
    "Conversation": "serving.model",
    "GPUDataCollatorForCLM": "objectives.causal",
    "InfiniLlama": "model.llama",
    "Memory": "model.memory",
    "Model": "serving.model",
    "generate": "model.generate",
    "get_gpu_train_dataloader": "data.loading.gpu",
    "gpu_clm_process": "data.loading.gpu",
    "infini_attention": "model.attention",
    "load_config": "config",
    "load_tokenizer": "data.tokenizers.load",
}
__all__ = [*_MODULES]

for _variable, _value in {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}.items():
    os.environ.setdefault(_variable, _value)
if not {"http_proxy", "https_proxy", "all_proxy"}.isdisjoint(map(str.lower, os.environ)):
    _direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")).split(",")
    if "*" not in _direct:
        _direct += [host for host in ("localhost", "127.0.0.1", "::1") if host not in _direct]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, _direct))

if not TYPE_CHECKING:  # a type checker would take every name to be there

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
