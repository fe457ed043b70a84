"""Models in `transformers`, with and without this package: they compute what `InfiniLlama` does."""

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PeftModel, get_peft_model
from real import smollm2
from safetensors.torch import load_file
from tiny_models import draw_memory_parameters, tiny_model
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.harness import HarnessModel
from infini_model.hf import InfiniLlamaForCausalLM
from infini_model.hf.modeling_infini_llama import CACHE, PlainInfiniLlamaForCausalLM
from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.training.export import bytes_as_bpe

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "residual": {},
    "no shift": {"memory_key_shift": False},
    "window": {"memory": "none", "window_segments": 2},
    "sinks": {"window_segments": 2, "window_sinks": 3},
    "qwen3": {"window_segments": 1, "qk_norm": "head", "head_dim": 6, "attention_bias": True},
    "qwen2": {"qkv_bias": True, "memory_query_shift": True, "tie_word_embeddings": True},
    "smollm3": {"window_segments": 1, "no_rope_layer_interval": 2},
    "olmo2": {"qk_norm": "projection", "post_norm": True},
    "yarn": {"window_segments": 1, "rope_scaling": YARN},
    "llama3": {"window_segments": 1, "rope_scaling": {**YARN, **BANDS, "rope_type": "llama3"}},
    "odd head": {"hidden_size": 18, "head_dim": 6},
}
CLASSES = {"registered": InfiniLlamaForCausalLM, "plain": PlainInfiniLlamaForCausalLM}
# Rows of 0, 7 and 19 tokens of padding.
WIDTH, PADDING = 30, torch.tensor([[0], [7], [19]])
REAL = (torch.arange(WIDTH) >= PADDING).long()
GREEDY = {"do_sample": False, "max_new_tokens": 17, "pad_token_id": 0}


def saved(tmp_path, **fields):
    model = tiny_model(dtype=torch.float32, **fields).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    return model


@pytest.fixture(params=CLASSES)
def pair(request, tmp_path):
    """A model with all parts of the attention, and it in transformers."""
    model = saved(tmp_path, window_segments=1, window_sinks=2)
    return model, CLASSES[request.param].from_pretrained(tmp_path / "model")


def ids_of(width=WIDTH):
    return torch.randint(11, (3, width), generator=torch.Generator().manual_seed(3))


def close(ours, theirs):
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", CLASSES)
@torch.no_grad()
def test_logits_are_those_of_the_model_at_once_padded_and_in_pieces(form, kind, tmp_path):
    model, ids = saved(tmp_path, **KINDS[kind]), ids_of()
    theirs, found = CLASSES[form].from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(found.values())
    close(model(ids).logits, theirs(ids).logits)
    # Not one of them depends on what is in the padding, on either side.
    wanted = [model(row[None, hidden:]).logits[0] for row, hidden in zip(ids, PADDING, strict=True)]
    padded = theirs(ids, attention_mask=REAL).logits
    right = theirs(ids.flip(1).where(REAL.flip(1) == 1, 5), attention_mask=REAL.flip(1)).logits
    pieces, cache = [], None
    for first, end in ((0, 9), (9, 10), (10, 23), (23, WIDTH)):
        mask = REAL[:, :end]
        out = theirs(ids[:, first:end], attention_mask=mask, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        pieces.append(out.logits)
    for row, (logits, hidden) in enumerate(zip(wanted, PADDING[:, 0].tolist(), strict=True)):
        close(logits, padded[row, hidden:])
        close(logits, torch.cat(pieces, 1)[row, hidden:])
        reversed_row = ids[row, hidden:].flip(0)[None]
        close(model(reversed_row).logits[0], right[row, : WIDTH - hidden])


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_the_memories_of_the_paper_open_by_this_package_alone(memory, tmp_path):
    model, ids = saved(tmp_path, memory=memory), ids_of()
    close(model(ids).logits, InfiniLlamaForCausalLM.from_pretrained(tmp_path / "model")(ids).logits)
    with pytest.raises(ValueError, match=rf"'memory': '{memory}'.* is not supported by this file"):
        PlainInfiniLlamaForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("form", CLASSES)
def test_a_model_of_diffusion_is_refused(form, tmp_path):
    saved(tmp_path, bidirectional=True, mask_token_id=10)
    with pytest.raises(ValueError, match=r"diffusion|bidirectional"):
        CLASSES[form].from_pretrained(tmp_path / "model")


def test_greedy_text_is_that_of_the_model_however_it_is_generated(pair):
    model, theirs = pair
    ids = ids_of()
    prompts = [row[hidden:].tolist() for row, hidden in zip(ids, PADDING, strict=True)]
    wanted = generate(model, prompts, max_new_tokens=17, temperature=0)
    for more in ({}, {"use_cache": False}, {"prefill_chunk_size": 7}, {"in training": True}):
        theirs.train(more.pop("in training", False))
        text = theirs.generate(ids, attention_mask=REAL, **GREEDY, **more)
        assert text[:, WIDTH:].tolist() == wanted, more
    theirs.eval()
    # A conversation goes on from its cache, which reads the new tokens alone.
    first = theirs.generate(ids[:1], **GREEDY, return_dict_in_generate=True)
    asked = torch.cat((first.sequences, torch.tensor([[3, 4, 5]])), 1)
    cache = first[CACHE]
    assert cache.get_seq_length() == first.sequences.size(1) - 1
    assert torch.equal(
        theirs.generate(asked, **GREEDY, **{CACHE: cache}), theirs.generate(asked, **GREEDY)
    )


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True}], ids=["beams", "sampled"])
def test_beams_and_samples_do_not_depend_on_the_cache(how, pair):
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        settings = {**GREEDY, **how, "use_cache": use_cache}
        texts.append(pair[1].generate(ids_of(), attention_mask=REAL, **settings))
    assert torch.equal(*texts)


@torch.no_grad()
def test_the_cache_is_constant_in_size_and_its_rows_can_be_chosen(pair):
    model, theirs = pair
    sizes, cache = set(), None
    for start in range(0, 200, 25):  # after one segment and one token, and so on
        cache = theirs(ids_of(200)[:, start : start + 25], **{CACHE: cache}, use_cache=True)[CACHE]
        if start % 100 == 0:
            leaves = tree_leaves(cache.state)
            sizes.add(sum(each.numel() for each in leaves if each is not None))
    assert len(sizes) == 1
    rows = torch.tensor([2, 0, 0])
    cache.batch_select_indices(rows)
    out = theirs(ids_of(3)[rows], **{CACHE: cache}, use_cache=True)
    close(model(torch.cat((ids_of(200), ids_of(3)), 1)[rows]).logits[:, -3:], out.logits)
    cache.batch_repeat_interleave(2)
    out = theirs(ids_of(2)[:1].expand(6, -1), **{CACHE: cache}, use_cache=True)
    assert torch.equal(out.logits[0::2], out.logits[1::2])
    with pytest.raises(ValueError, match="cannot forget"):
        cache.crop(1)
    cache.reset()
    close(model(ids_of()).logits, theirs(ids_of(), **{CACHE: cache}).logits)


def test_gradients_are_those_of_the_model_also_when_layers_are_recomputed(pair):
    model, theirs = pair
    ids = ids_of()
    loss = model.train()(ids[:, :-1], labels=ids[:, 1:]).loss
    loss.backward()
    wanted = {name: each.grad for name, each in model.named_parameters()}
    recomputes = (False, True) if isinstance(theirs, InfiniLlamaForCausalLM) else (False,)
    for recompute in recomputes:
        theirs.train().zero_grad()
        if recompute:
            theirs.gradient_checkpointing_enable()
        out = theirs(ids, labels=ids)
        close(loss, out.loss)
        assert out.get(CACHE) is None
        kept = theirs(ids[:, :13], use_cache=True)
        more = theirs(ids[:, 13:], **{CACHE: kept[CACHE]}, use_cache=True)
        close(theirs(ids).logits[:, 13:], more.logits)
        out.loss.backward()
        for name, each in theirs.named_parameters():
            ours = name if name in wanted else name.replace("self_attn.", "self_attn.memory.")
            close(wanted[ours], each.grad)
    with torch.no_grad():
        close(model.eval()(ids).logits, theirs(ids).logits)


def test_what_transformers_saves_is_what_it_has_read(pair, tmp_path):
    model, theirs = pair
    theirs.save_pretrained(tmp_path / "again")
    files = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    before, after = files
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert InfiniLlama.from_pretrained(tmp_path / "again").config == model.config


@pytest.mark.parametrize("form", CLASSES)
def test_what_a_folder_lacks_starts_as_in_a_new_model(form, tmp_path, monkeypatch):
    saved(tmp_path, memory="none", window_segments=1)
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace('"none"', '"residual"', 1))
    config = AutoConfig.from_pretrained(file.parent)
    assert config.attention["memory"] == "residual"
    reference = InfiniLlama(AutoModelForCausalLM.from_config(config).shape)
    empty = torch.empty_like  # what it holds is anything
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kw: empty(*args, **kw).fill_(7))
    loaded = CLASSES[form].from_pretrained(file.parent)
    for name, each in reference.named_parameters():
        if ".memory." in name:
            ours = name if form == "registered" else name.replace(".memory.", ".")
            for new in (loaded, CLASSES[form](config)):
                assert torch.equal(new.get_parameter(ours), each), name
    if form == "registered":
        assert torch.equal(loaded.model.cos, reference.model.cos)


def test_a_trainer_resumes_with_all_parameters(pair, tmp_path):
    """It loads the tensors of a file by `load_state_dict`, and goes on without those it misses."""
    _, theirs = pair
    new = type(theirs)(theirs.config)
    new.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert all(map(torch.equal, new.parameters(), theirs.parameters()))
    new.load_state_dict(theirs.state_dict())


def test_a_config_that_says_nothing_of_the_attention_is_one_segment(tmp_path):
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 6}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("infini_llama", **sizes))
    model.eval().save_pretrained(tmp_path / "model")
    ours = InfiniLlama.from_pretrained(tmp_path / "model")
    assert (ours.config.segment_length, ours.config.memory) == (6, "residual")
    close(ours(ids_of()).logits, model(ids_of()).logits)
    plain = PlainInfiniLlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    close(ours(ids_of()).logits, plain(ids_of()).logits)
    with pytest.raises(ValueError, match="qk_norm"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("infini_llama", qk_norm="some"))


def test_layers_on_several_devices_compute_the_same(tmp_path):
    """Weights on the disk come by hooks, as those of another GPU's layers would."""
    model = saved(tmp_path, window_segments=1)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    for form in CLASSES.values():
        theirs = form.from_pretrained(
            tmp_path / "model",
            device_map=places | ({"model.rotary_emb": "cpu"} if form is CLASSES["plain"] else {}),
            offload_folder=tmp_path / "offload",
        )
        with torch.no_grad():
            close(model(ids_of()).logits, theirs(ids_of(), attention_mask=None).logits)
        mask = torch.ones(3, WIDTH)  # or zeros would be taken for padding
        text = theirs.generate(ids_of(), attention_mask=mask, **GREEDY)[:, WIDTH:].tolist()
        assert text == generate(model, ids_of(), max_new_tokens=17, temperature=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs_embeds": torch.zeros(3, WIDTH, 16)}, "inputs_embeds: not supported"),
        ({"output_attentions": True}, "output_attentions: not supported"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2] * 5])},
            "position_ids: several texts in one row are not supported",
        ),
        (
            {"position_ids": torch.tensor([[1, 2, 3, 1, 2, 3] * 5])},
            "position_ids: several texts in one row are not supported",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 90])}, "cu_seq_lens_q: not supported"),
        ({CACHE: DynamicCache()}, "expected an InfiniLlamaCache, got DynamicCache"),
    ],
    ids=["embeddings", "attentions", "packed", "packed from 1", "flash", "cache"],
)
def test_what_would_be_computed_wrongly_is_refused(given, message, pair):
    with pytest.raises((TypeError, ValueError), match=message):
        pair[1](ids_of(), **given)


@pytest.mark.parametrize("shape", [(3, 10), (3, 1, WIDTH, WIDTH)], ids=["short", "4-D"])
def test_a_mask_of_another_shape_is_an_error(shape, pair):
    with pytest.raises(RuntimeError, match=r"expanded size|number of sizes"):
        pair[1](ids_of(), attention_mask=torch.ones(shape))


def test_adapters_of_peft_are_trained_saved_and_merged(pair, tmp_path):
    _, theirs = pair
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(theirs, settings)
    optimizer = torch.optim.SGD((p for p in adapted.parameters() if p.requires_grad), 1.0)
    for _ in range(2):
        adapted.train()(ids_of(), labels=ids_of()).loss.backward()
        optimizer.step()
    adapted.save_pretrained(tmp_path / "adapter")
    base = type(theirs).from_pretrained(tmp_path / "model")
    plain = base(ids_of()).logits
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    wanted = adapted.eval()(ids_of()).logits
    close(wanted, loaded(ids_of()).logits)
    assert (wanted - plain).abs().max() > 1e-3
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    close(wanted, InfiniLlama.from_pretrained(tmp_path / "merged")(ids_of()).logits)


def test_the_harness_scores_and_continues_it_as_its_own_model(tmp_path):
    tokenizer = bytes_as_bpe()
    model = saved(tmp_path, vocab_size=256)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._reference, **tokenizer.special_tokens()
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = HFLM(pretrained=loaded, tokenizer=fast, batch_size=2)
    ours = HarnessModel(model, ByteTokenizer(), batch_size=2)
    pairs = [("a text of several segments, ünïcödé", " that goes on"), ("", "short"), ("b", " c")]
    asked = [Instance("loglikelihood", {}, each, n) for n, each in enumerate(pairs)]
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert mine == (pytest.approx(other[0], abs=1e-4), other[1])
    prompts = [("a text of several segments", {"until": ["\n"], "max_gen_toks": 9}), ("b", {})]
    prompts[1] = ("b", prompts[0][1])
    asked = [Instance("generate_until", {}, each, n) for n, each in enumerate(prompts)]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.mark.story
def test_a_real_llama_with_a_memory_in_the_three_ways(tmp_path):
    """SmolLM2, cut into segments, with a memory that is read."""
    model = InfiniLlama.from_pretrained(smollm2(), segment_length=128, window_segments=1).eval()
    draw_memory_parameters(model)
    for name, each in model.named_parameters():
        each.data.mul_(0.05 if "memory" in name else 1.0)
    model.save_pretrained(tmp_path / "model")
    text = Path(__file__).read_bytes()[:700]
    ids = torch.tensor([list(text)])
    wanted = generate(model, ids, max_new_tokens=12, temperature=0)
    with torch.no_grad():
        logits = model(ids).logits
        for form in CLASSES.values():
            theirs = form.from_pretrained(tmp_path / "model")
            found = theirs(ids).logits
            assert (found - logits).abs().max() < 1e-5 * logits.abs().max()
            new = theirs.generate(ids, **{**GREEDY, "max_new_tokens": 12})[:, ids.size(1) :]
            assert new.tolist() == wanted
