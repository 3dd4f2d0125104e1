"""The exported model in `transformers`: caches, padding, beams, round trips, and plain PyTorch without `tamis`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.generate import Sampling, generate
from tamis.generate.export import export_command
from tamis.generate.load import load_model
from tamis.model import Decoder
from tests.generate.test_load import save
from tests.generate.test_sample import PROMPT, tokens_of
from tests.model.tiny import tiny_model

PROMPTS = [PROMPT, list(b"War and peace, the long way round the world"), list(b"x")]
GREEDY = {"max_new_tokens": 12, "do_sample": False}
KINDS = {
    "nsa": (),
    "dense": ("model.attention=dense",),
    "mixed": ('nsa.layers=["nsa", "window"]', "nsa.phi=avg", "model.rope_scale=2.0"),
    "speedrun": ("model.qk_norm=true", "model.mlp=relu2", "model.logit_soft_cap=3.0"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported folders by kind of attention."""
    path = tmp_path_factory.mktemp("exported")
    return {
        kind: export_command(save(path / f"run_{kind}", tiny_model(*keys)), path / kind) for kind, keys in KINDS.items()
    }


def load(folder: Path, **options: Any) -> Any:
    import transformers  # here, because every test process loads this file

    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@pytest.fixture
def without_tamis(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports of the package fail, as where it is not installed."""
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] in ("tamis", "triton", "pydantic")]:
            patch.setitem(sys.modules, name, None)
        for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
            patch.delitem(sys.modules, name)
        yield
        for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
            del sys.modules[name]  # a later test would get the code that found no package


@pytest.fixture(params=["with tamis", "without tamis"])
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    if request.param == "without tamis":
        request.getfixturevalue("without_tamis")
    loaded = load(folders["nsa"])
    assert type(loaded.decoder).__name__ == ("Decoder" if request.param == "with tamis" else "PlainDecoder")
    return loaded


def padded(prompts: list[list[int]], left: bool = True) -> dict[str, torch.Tensor]:
    """The prompts as one batch, with the mask of its padding."""
    longest = max(map(len, prompts))
    pads = [[0] * (longest - len(prompt)) for prompt in prompts]
    ids = [pad + prompt if left else prompt + pad for pad, prompt in zip(pads, prompts, strict=True)]
    ones = [[1] * len(prompt) for prompt in prompts]
    mask = [pad + one if left else one + pad for pad, one in zip(pads, ones, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def ours(prompts: list[list[int]], model: Decoder | None = None) -> list[list[int]]:
    return tokens_of(generate(model or tiny_model(), prompts, 12, Sampling(temperature=0)))


def test_generate_reads_the_prompt_once_and_gives_the_tokens_of_tamis_generate(model: Any) -> None:
    """Alone and in a left-padded batch; every call after the first reads one token."""
    expected, sizes, forward = ours(PROMPTS), [], model.forward
    model.forward = lambda *args, **kwargs: sizes.append(kwargs["input_ids"].shape[1]) or forward(*args, **kwargs)
    model._supports_logits_to_keep = lambda: True
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        got = model.generate(torch.tensor([prompt]), **GREEDY, eos_token_id=None)
        assert got[0, len(prompt) :].tolist() == tokens
    assert sizes[:13] == [len(PROMPT), *[1] * 11, len(PROMPTS[1])]
    got = model.generate(**padded(PROMPTS), **GREEDY, eos_token_id=None)
    assert got[:, max(map(len, PROMPTS)) :].tolist() == expected


@torch.no_grad()
def test_a_cache_passed_by_hand_gives_the_logits_of_one_pass(model: Any) -> None:
    """In pieces, after padding, beyond the first room, and from a copy."""
    ids = torch.tensor([list(b"The state of the Union is strong, and it will be so again next year!")])
    whole = model(ids).logits
    first = model(ids[:, :20], use_cache=True)
    cache = first.past_key_values
    parts = [first.logits, model(ids[:, 20:21], past_key_values=cache).logits]
    other = copy.deepcopy(cache)
    parts.append(model(ids[:, 21:], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    again = model(ids[:, 21:22], past_key_values=other).logits
    torch.testing.assert_close(again[0, 0], whole[0, 21], atol=1e-4, rtol=1e-4)
    assert (cache.get_seq_length(), other.get_seq_length()) == (ids.shape[1], 22)

    inputs = padded(PROMPTS)
    small = type(cache)(max_len=1)
    read = model(**inputs, past_key_values=small).logits
    stepped = model(torch.tensor([[1], [2], [3]]), past_key_values=small).logits
    extended = model(torch.tensor([[4, 5], [6, 7], [8, 9]]), past_key_values=small).logits
    for i, prompt in enumerate(PROMPTS):
        tokens = [[1, 4, 5], [2, 6, 7], [3, 8, 9]][i]
        alone = model(torch.tensor([prompt + tokens])).logits[0]
        got = torch.cat((read[i, -len(prompt) :], stepped[i], extended[i]))
        torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)


def test_one_pass_takes_padding_on_either_side_with_gradients_and_labels(model: Any) -> None:
    for left in (True, False):
        inputs = padded(PROMPTS, left)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        output = model(**inputs, labels=labels)
        for i, prompt in enumerate(PROMPTS):
            rows = slice(-len(prompt), None) if left else slice(0, len(prompt))
            alone = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(output.logits[i, rows], alone, atol=1e-4, rtol=1e-4)
    output.loss.backward()
    assert bool(model.decoder.blocks[0].attention.project.weight.grad.abs().sum() > 0)


def test_beams_continue_their_own_sequences(model: Any) -> None:
    """With the cache as without it, from a left-padded batch."""
    options = {**GREEDY, "num_beams": 3, "eos_token_id": None}
    cached = model.generate(**padded(PROMPTS), **options)
    assert cached.tolist() == model.generate(**padded(PROMPTS), **options, use_cache=False).tolist()


def test_what_is_not_supported_is_refused_by_name(model: Any) -> None:
    from transformers import DynamicCache

    ids = torch.tensor([PROMPT])
    holes = torch.ones_like(ids)
    holes[0, 3] = 0
    calls = {
        "assisted generation is not supported": lambda: model.generate(ids, prompt_lookup_num_tokens=3, **GREEDY),
        "cache_implementation is not supported": lambda: model.generate(ids, cache_implementation="static", **GREEDY),
        "past_key_values must be a TamisCache": lambda: model(ids, past_key_values=DynamicCache()),
        "pad each row before or after": lambda: model(ids, attention_mask=holes),
        "pad each row on the left": lambda: model(ids, attention_mask=holes, use_cache=True),
        "hides a whole row": lambda: model(ids, attention_mask=holes * 0),
        "must have 2 dimensions": lambda: model(ids, attention_mask=holes[None].bool() & False),
        "73 tokens": lambda: model.generate(torch.ones(1, 70, dtype=torch.long), max_new_tokens=5, eos_token_id=None),
        "holds 1 sequences, input_ids has 2": lambda: model(
            ids.repeat(2, 1), past_key_values=model(ids, use_cache=True).past_key_values
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(1, 1, 1))
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        model(ids, use_cache=True).past_key_values.crop(3)


@pytest.mark.parametrize("kind", ["dense", "mixed", "speedrun"])
def test_every_kind_of_layer_is_the_same_without_tamis(
    kind: str, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    keys = KINDS[kind]
    expected, whole = ours(PROMPTS, tiny_model(*keys)), load(folders[kind])(torch.tensor([PROMPTS[1]])).logits
    request.getfixturevalue("without_tamis")
    plain = load(folders[kind])
    torch.testing.assert_close(plain(torch.tensor([PROMPTS[1]])).logits, whole, atol=1e-4, rtol=1e-4)
    got = plain.generate(**padded(PROMPTS), **GREEDY, eos_token_id=None)
    assert got[:, max(map(len, PROMPTS)) :].tolist() == expected


def test_the_code_of_the_folder_needs_torch_and_transformers_alone(folders: dict[str, Path]) -> None:
    from transformers.dynamic_module_utils import get_imports

    needed = {name for path in folders["nsa"].glob("*.py") for name in get_imports(path)}
    assert needed - sys.stdlib_module_names == {"torch", "transformers"}


def test_pipeline_dtypes_and_a_round_trip_through_save_pretrained(folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    model, ids = load(folders["nsa"]), torch.tensor([PROMPT])
    model.save_pretrained(tmp_path / "again")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["nsa"], trust_remote_code=True)
    tokenizer.save_pretrained(tmp_path / "again")
    again, loaded = load(tmp_path / "again"), load_model(tmp_path / "again", device="cpu")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(loaded.model.logits(loaded.model(ids)[0]), tiny_model().logits(tiny_model()(ids)[0]))
    pipeline = transformers.pipeline("text-generation", model=again, tokenizer=tokenizer)
    texts = pipeline(["War", "The state of"], batch_size=2, max_new_tokens=4, do_sample=False)
    assert [text[0]["generated_text"][:3] for text in texts] == ["War", "The"]
    half = load(folders["nsa"], dtype=torch.bfloat16)
    rounded = model.to(torch.bfloat16)  # after its first use: the rotary tables must stay exact
    assert half(ids).logits.dtype == torch.bfloat16
    assert torch.equal(half(ids).logits, rounded(ids).logits)
    assert torch.equal(half.generate(ids, **GREEDY), rounded.generate(ids, **GREEDY))
