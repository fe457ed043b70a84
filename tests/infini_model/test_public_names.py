"""What users import from `infini_model` itself, and what that costs them."""

import subprocess
import sys

import pytest

import infini_model


def test_each_name_is_there_and_no_other():
    assert "InfiniLlama" in infini_model.__all__
    for name in infini_model.__all__:
        assert getattr(infini_model, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Llama'"):
        _ = infini_model.Llama


def test_importing_costs_no_torch_and_the_model_no_compiler():
    code = """
import sys
from infini_model import load_config, load_tokenizer
assert "torch" not in sys.modules
import infini_model.model.llama
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
