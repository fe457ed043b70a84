"""Tokenizers whose post-processor puts a token in front of every text."""

from tokenizers import Tokenizer, processors

BOS = "<|begin_of_text|>"


def with_bos(definition: str, token: str = BOS, template: str = "{} $A") -> str:
    """A `tokenizer.json` with such a template, as Llama 3 has it.

    `template` says where the token goes; a token that is not in the vocabulary is added.
    """
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.add_special_tokens([token])
    number = tokenizer.token_to_id(token)
    around = processors.TemplateProcessing(
        single=template.format(*[token] * template.count("{}")), special_tokens=[(token, number)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), around])
    return str(tokenizer.to_str())
