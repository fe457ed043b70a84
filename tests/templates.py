"""Templates of tokenizers: a token in front of every text, and the form of a conversation."""

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


def of_messages(line: str) -> str:
    """A chat template of such a line a message, with `{role}` and `{content}`."""
    message = line.replace("{role}", "{{ m.role }}").replace("{content}", "{{ m.content }}")
    opening = line.partition("{content}")[0].replace("{role}", "assistant")
    asked = f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    return f"{{% for m in messages %}}{message}{{% endfor %}}{asked}"
