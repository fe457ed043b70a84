"""Large programs for the interpreter, in which each costs a tenth of a second whatever it does."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _large_programs() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    from infini_model.data.tokenizers.bpe import BPETokenizer
    from infini_model.data.tokenizers.gpu import pretokens, word_model, word_table

    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    whole = BPETokenizer.vocabulary
    patched = set()

    def patch_once(function):
        if function in patched:
            return None
        patched.add(function)
        return patch_lang(function)

    def launch_anew(*arguments, **keywords):
        patched.clear()
        return launch(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        # Triton's modules are patched once a launch and function, not in each call.
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(pretokens, "BYTES", 1 << 16)
        patch.setattr(word_table, "WORDS", 1 << 13)
        patch.setattr(word_model, "SYMBOLS", 1 << 16)
        # The words with which a tokenizer fills its table at first; it adds others as they come.
        patch.setattr(BPETokenizer, "vocabulary", lambda tokenizer: whole(tokenizer)[-9:])
        yield
