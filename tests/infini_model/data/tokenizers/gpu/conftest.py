"""Large programs for the interpreter, in which each costs a tenth of a second whatever it does."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _patched_once() -> Iterator[None]:
    """The interpreter patches Triton's modules once a launch and function, not in each call."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(function):
        if function not in patched:
            patched.add(function)
            return patch_lang(function)
        return None

    def launch_anew(*arguments, **keywords):
        patched.clear()
        return launch(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield


@pytest.fixture(scope="session", autouse=True)
def _large_programs() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from infini_model.data.tokenizers.bpe import BPETokenizer
    from infini_model.data.tokenizers.gpu import pretokens, word_model, word_table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretokens, "BYTES", 1 << 16)
        patch.setattr(word_table, "WORDS", 1 << 13)
        patch.setattr(word_model, "SYMBOLS", 1 << 16)
        # The words with which a tokenizer fills its table at first; it adds others as they come.
        whole = BPETokenizer.vocabulary
        patch.setattr(BPETokenizer, "vocabulary", lambda tokenizer: whole(tokenizer)[-9:])
        yield
