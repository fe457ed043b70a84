"""What users import from `infini_model` itself."""

import subprocess
import sys

import pytest

import infini_model


def test_each_name_is_there():
    assert "InfiniLlama" in infini_model.__all__
    for name in infini_model.__all__:
        assert getattr(infini_model, name).__name__ == name
    assert set(infini_model.__all__) <= set(dir(infini_model))


def test_another_name_is_not():
    with pytest.raises(AttributeError, match="no attribute 'Llama'"):
        _ = infini_model.Llama


@pytest.mark.parametrize(
    "statement", ["import infini_model", "from infini_model import load_config, load_tokenizer"]
)
def test_importing_costs_no_torch(statement):
    code = f"import sys; {statement}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_model_costs_no_compiler():
    code = "import sys, infini_model.model.llama; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
