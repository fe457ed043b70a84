"""The facts that the files beside a tokenizer.json state: which tokens end a text, and the chat."""

import json
import unicodedata

import pytest
from real import real_tokenizer, smollm2
from templates import of_messages
from transformers import AutoTokenizer, GenerationConfig

from infini_model.config import validate
from infini_model.data.build import build_dataset
from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.listing import list_sources
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer, load_saved, load_tokenizer
from infini_model.data.tokenizers.tokenizer import PROBE
from infini_model.runtime.errors import DataError

# What ends a document, then what else ends an answer.
REAL = {
    "gemma3": "<eos> (1); answers also with <end_of_turn> (106)",
    "qwen3": "<|endoftext|> (151643); answers also with <|im_end|> (151645)",
    "llama3": "<|end_of_text|> (128001)",
    "llama2": "</s> (2)",
    "deepseek_v3": "<｜end▁of▁sentence｜> (1)",
    "smollm2": "<|im_end|> (2)",
}
TALK = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2 👍"},
    {"role": "user", "content": "And {{ 2 }} + 2?"},
]


def folder_of(name):
    return smollm2() if name == "smollm2" else real_tokenizer(name)


@pytest.mark.parametrize("name", REAL)
def test_what_ends_a_text_is_what_a_real_folder_states(name):
    assert load_tokenizer(str(folder_of(name))).described_ends() == REAL[name]


@pytest.mark.parametrize("name", [*REAL, "bytes"])
def test_the_tokens_of_a_text_stand_for_its_bytes_and_special_ones_for_none(name):
    tokenizer = load_tokenizer(name if name == "bytes" else str(folder_of(name)))
    lengths = tokenizer.byte_lengths()
    for text in PROBE[3:]:
        if text == unicodedata.normalize("NFC", text):  # as qwen3 reads it
            # SentencePiece puts a space in front of a text for Llama 2.
            expected = len(text.encode()) + (name == "llama2")
            assert lengths[tokenizer.encode_batch([text]).ids].sum() == expected
    ends = [*tokenizer.end_token_ids, *filter(None, [tokenizer.bos_token_id])]
    assert not lengths[ends].any()


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "llama3", "deepseek_v3", "smollm2"])
def test_a_real_chat_template_gives_the_text_that_transformers_gives(name):
    folder = folder_of(name)
    chat, theirs = load_tokenizer(str(folder)).chat(), AutoTokenizer.from_pretrained(folder)
    for messages in (TALK, TALK[:1], [{"role": "system", "content": "Be brief."}, *TALK]):
        for asks in (False, True):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
            assert chat.begin + chat.render(messages, asks=asks) == text
    # What is said in turns is what is said at once.
    begun = chat.render(TALK[:1]) + TALK[1]["content"] + chat.next_turn(TALK[2:])
    if name != "qwen3":  # which shows a thought in the last answer alone
        assert begun == chat.render(TALK)


@pytest.fixture(scope="module")
def vocabulary():
    """A tokenizer whose ordinary pieces look like tokens that end a text."""
    tree = json.loads(train_tokenizer([["<eos> </s> the stone"] * 9], 300).text)
    pieces = tree["model"]["vocab"]
    pieces["<|im_end|>"] = pieces.pop("<|end_of_text|>")
    pieces["</s>"] = len(pieces)
    tree["added_tokens"][0]["content"] = "<|im_end|>"
    return tree


def write(folder, tree, **files):
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_an_ordinary_piece_is_never_an_end(tmp_path, vocabulary):
    # Ids that transformers fills in by default are of ordinary pieces.
    spec = write(tmp_path, vocabulary, config={"eos_token_id": 2}, generation_config={})
    with pytest.raises(DataError, match=r"data\.tokenizer\.eos_token names .*: <\|im_end\|>$"):
        load_tokenizer(spec)
    named = load_tokenizer(spec, eos_token="</s>")
    assert named.end_token_ids == (vocabulary["model"]["vocab"]["</s>"],)
    with pytest.raises(DataError, match=r"eos_token: '<\|x\|>' is not a token of "):
        load_tokenizer(spec, eos_token="<|x|>")
    stated = write(tmp_path, vocabulary, tokenizer_config={"eos_token": {"content": "<|im_end|>"}})
    assert load_tokenizer(stated).end_token_ids == (0,)
    write(tmp_path, vocabulary, tokenizer_config={"eos_token": "<|gone|>"})
    with pytest.raises(DataError, match=r"eos_token '<\|gone\|>' is not in the vocabulary"):
        load_tokenizer(spec)


def test_a_list_of_ends_and_the_chat_template_go_through_a_dataset(tmp_path, vocabulary):
    source = tmp_path / "base"
    source.mkdir()
    end = len(vocabulary["model"]["vocab"])
    added = {"id": end, "content": "<|end_of_text|>", "special": True}
    tree = json.loads(json.dumps(vocabulary))
    tree["added_tokens"].append(tree["added_tokens"][0] | added)
    generation = {"eos_token_id": [end, 0], "temperature": 0.6, "do_sample": True}
    config = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}<|im_end|>"}
    write(source, tree, tokenizer_config=config, generation_config=generation)
    (tmp_path / "a.txt").write_text("the stone")
    data = {"source": {"paths": str(tmp_path / "a.txt")}, "tokenizer": {"spec": str(source)}}
    splits = {"train": 1.0, "validation": 0.0, "test": 0.0}
    asked = validate({"data": data | {"splits": splits}}).data
    manifest = build_dataset(list_sources(asked, tmp_path), asked, tmp_path / "datasets")
    folder = tmp_path / "datasets" / manifest.folder_name
    tokenizer = load_dataset_tokenizer(folder)
    assert tokenizer.end_token_ids == (end, 0)
    assert manifest.tokenizer.eos_token_id == end
    assert GenerationConfig.from_pretrained(folder) == GenerationConfig.from_pretrained(source)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == config["chat_template"] == tokenizer.chat_template
    assert theirs.eos_token == "<|im_end|>"


def test_added_tokens_without_a_row_of_the_weights_are_left_out(tmp_path, vocabulary, caplog):
    tree = json.loads(json.dumps(vocabulary))
    rows = len(tree["model"]["vocab"])
    tree["added_tokens"].append(tree["added_tokens"][0] | {"id": rows, "content": "<pad>"})
    stated = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    spec = write(tmp_path, tree, tokenizer_config=stated, config={"vocab_size": rows})
    tokenizer = load_tokenizer(spec)
    assert tokenizer.vocab_size == rows
    assert tokenizer.decode(tokenizer.encode_batch(["a <pad> b"]).ids) == "a <pad> b"
    assert f"its weights have {rows} tokens, without <pad>" in caplog.text
    tokenizer.save(tmp_path)
    assert load_saved(tmp_path, "x").fingerprint == tokenizer.fingerprint


def test_a_folder_with_another_form_of_tokenizer_says_what_is_read(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(DataError, match=r"has tokenizer\.model, but only tokenizer\.json is read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "conversation: Roles must alternate"),
        ("{% for m in messages %}{{ m.name.first }}{% endfor %}", "has no attribute 'name'"),
        ("{% for %}", r"is not valid: line 1: "),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'.* is unsafe"),
        ("{{ messages|length }}", "changes the prompt"),
        ("{{ 1 // 0 }}", "conversation: integer division or modulo by zero"),
        ("{{ range(999999999) }}", "conversation: Range too big"),
        (
            "{% for m in messages %}{{ m.content }}<sep>{% endfor %}",
            "puts '<sep>' after a prompt and after an answer alike",
        ),
    ],
)
def test_a_template_that_refuses_is_quoted_in_one_line(source, reason):
    with pytest.raises(DataError, match=reason) as caught:
        ChatTemplate(source).pieces(TALK[:2])
    assert "\n" not in str(caught.value)


def test_without_a_template_a_message_is_its_role_and_its_content():
    text = "".join(f"{each['role']}:\n{each['content']}\n\n" for each in TALK)
    assert ChatTemplate(PLAIN_TEMPLATE).render(TALK, asks=False) == text
    assert ChatTemplate(PLAIN_TEMPLATE).render(TALK) == f"{text}assistant:\n"


def test_what_ends_the_document_is_not_there_twice():
    chat = ChatTemplate(of_messages("<{role}>{content}<end>\n"), end="<end>")
    talk = [*TALK[:2], {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    asked, again = "<user>1 + 1?<end>\n<assistant>", "\n<user>?<end>\n<assistant>"
    assert chat.pieces(talk) == [asked, "2 👍<end>", again, "!"]
    assert ChatTemplate(chat.source).pieces(talk)[-1] == "!<end>"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # The last message alone is closed with a token of its own, or shown in full.
        (
            "{{ m.content }}<{{ 'x' if loop.last and m.role != 'user' }}>",
            "closes an earlier answer",
        ),
        ("{{ m.content if loop.revindex < 3 else '…' }}<end>", "changes the prompt once"),
    ],
)
def test_a_template_that_later_messages_change_can_learn_the_last_answer_alone(source, reason):
    talk = [*TALK[:2], {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    opening = "{% for m in messages %}<{{ m.role }}>"
    asks = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    chat = ChatTemplate(opening + source + asks)
    with pytest.raises(DataError, match=f"{reason}.*; data.source.learn=last learns the last"):
        chat.pieces(talk)
