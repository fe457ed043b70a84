"""A rule of the memory is a class in one file: CONTRIBUTING's example works like the built-in."""

import re
import textwrap
from pathlib import Path

import torch
from tiny_models import tiny_model

from infini_model.model import memory

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


def test_the_example_of_a_rule_reads_what_was_written_in_any_chunks(monkeypatch):
    (code,) = re.findall(
        r"```python\n(.*?class Sum\(Rule\).*?)```", CONTRIBUTING.read_text(), re.DOTALL
    )
    names = {"__name__": "example"}
    exec(textwrap.dedent(code), names)
    monkeypatch.setitem(memory.RULES, "linear", names["Sum"])
    model = tiny_model(memory="linear", window_segments=1)
    torch.nn.init.ones_(model.attentions[0].memory.sum_weight)
    ids = torch.randint(11, (2, 14), generator=torch.Generator().manual_seed(0))
    whole, state, parts = model(ids).logits, None, []
    for chunk in ids.split([3, 1, 6, 4], dim=1):
        out = model(chunk, state=state)
        state = out.state
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)
    assert (model.hidden(ids) - model.hidden(ids, without="memory")).abs().max() > 1e-3
    whole.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.attentions[0].memory.parameters())
