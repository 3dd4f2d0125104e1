"""An exported Tamis model for `transformers`. The `tamis` package computes it if installed, else plain PyTorch does.

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel  # type: ignore[import-not-found]
from transformers.modeling_outputs import CausalLMOutputWithPast  # type: ignore[import-not-found]

try:
    from tamis.attention.layer import NSAAttention
    from tamis.attention.rotary import Rotary
    from tamis.attention.verify import require_decode
    from tamis.config import build_config
    from tamis.generate.sample import DecodeStep
    from tamis.model import Decoder

    HAS_TAMIS = True
except ImportError:
    HAS_TAMIS = False
from tamis.generate.plain_decoder import PlainDecoder, PlainStep

PREFILL_TILE = 4096  # prompt tokens read at a time: bounds the memory of a long prompt's activations
LEAST_ROOM = 256  # tokens a cache is first made for, if nothing else is known


class TamisConfig(PretrainedConfig):
    model_type = "tamis"

    def __init__(self, tamis: dict[str, Any] | None = None, tamis_step: int = 0, **kwargs: Any) -> None:
        self.tamis, self.tamis_step = tamis or {}, tamis_step
        super().__init__(**kwargs)


class TamisCache(Cache):
    """The keys and values of the tokens read so far. The first call of the model fills it, later calls extend it.

    Args:
        max_len: tokens to make room for at once; it grows when there are more.
    """

    def __init__(self, max_len: int = LEAST_ROOM) -> None:
        super().__init__(layers=[])
        self.room = max_len
        self.columns = 0  # tokens of each row with their padding, as `transformers` counts
        self.lengths: list[int] = []  # tokens of each row without it
        self.tokens: Any = None  # the engine's cache
        self.step: Any = None

    @torch.no_grad()
    def read(self, decoder: Any, ids_BS: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Append the tokens, and return their hidden states `[B,S,E]`; those of padding are 0."""
        batch, new = ids_BS.shape
        if self.tokens is not None and batch != len(self.lengths):
            raise ValueError(f"past_key_values holds {len(self.lengths)} sequences, input_ids has {batch}")
        is_first, padding = self.tokens is None, [0] * batch
        if attention_mask is not None and (is_first or new > 1):
            padding = left_padding(attention_mask[:, -new:]).tolist()
        if any(padding) and not is_first:
            raise ValueError("padding in later tokens is not supported: pad on the left of the first ones")
        lengths = [n + new - p for n, p in zip(self.lengths or [0] * batch, padding, strict=True)]
        self._make_room(decoder, batch, max(lengths))
        hidden = self._append(decoder, ids_BS, padding, is_first)
        self.columns, self.lengths = self.columns + new, lengths
        return hidden

    def _append(self, decoder: Any, ids_BS: Tensor, padding: list[int], is_first: bool) -> Tensor:
        if ids_BS.shape[1] == 1 and not is_first:
            return self.step(ids_BS[:, 0])[:, None].clone()
        if not any(padding) and len({*self.lengths}) <= 1:
            return torch.cat([decoder.extend(part, self.tokens) for part in ids_BS.split(PREFILL_TILE, dim=1)], dim=1)
        rows = []
        for i, count in enumerate(padding):
            parts = ids_BS[i : i + 1, count:].split(PREFILL_TILE, dim=1)
            hidden = torch.cat([decoder.extend(part, self.tokens.row(i)) for part in parts], dim=1)
            rows.append(F.pad(hidden, (0, 0, count, 0)))
        return torch.cat(rows)

    def _make_room(self, decoder: Any, batch: int, longest: int) -> None:
        """Allocate for `longest` tokens, or twice as many where the first guess was too small."""
        if self.tokens is not None and longest <= self.tokens.max_len:
            return
        room = max(longest, self.room) if self.tokens is None else 2 * longest
        old, self.tokens = self.tokens, decoder.new_cache(batch, max(longest, min(room, decoder.max_len)))
        if old is not None:
            self.tokens.copy_from(old, torch.arange(batch))
        self.step = (DecodeStep if HAS_TAMIS else PlainStep)(decoder, self.tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.tokens.copy_from(self.tokens, beam_idx)
        self.lengths = [self.lengths[i] for i in beam_idx.tolist()]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reset(self) -> None:
        self.columns, self.lengths, self.tokens, self.step = 0, [], None, None

    def crop(self, *_: Any) -> None:
        raise NotImplementedError("a TamisCache cannot be cropped: make a new one from the shorter prompt")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("a TamisCache cannot be repeated: repeat the prompt instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("a TamisCache cannot be selected from: make a new one from the chosen prompts")

    @property
    def batch_size(self) -> int:
        return len(self.lengths) or -1

    @property
    def is_croppable(self) -> bool:
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> TamisCache:
        """Copy what was read; a captured decode step belongs to the original, so the copy makes its own."""
        other = TamisCache(self.room)
        other.columns, other.lengths = self.columns, list(self.lengths)
        other.tokens = copy.deepcopy(self.tokens, memo)
        if self.step is not None:
            other.step = type(self.step)(self.step.model, other.tokens)
        return other


class TamisForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TamisConfig
    _is_stateful = True  # a cache cannot be cropped, so assisted generation is refused

    def __init__(self, config: TamisConfig) -> None:
        super().__init__(config)
        self.decoder: Any
        length = config.max_position_embeddings
        if HAS_TAMIS:
            self.decoder = Decoder(build_config(config.tamis), max_len=length)
        else:
            self.decoder = PlainDecoder(config.tamis, config.vocab_size, length)
        self.is_ready = not HAS_TAMIS
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TamisCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits `[B,S,V]`, with `labels` also the loss, and with `use_cache=True` a cache to go on from.

        Rows may be padded on the left, or without a cache on the right, if `attention_mask` is 0 there. Gradients flow
        only without a cache.
        """
        self._prepare(input_ids.device)
        if past_key_values is None and use_cache:
            past_key_values = TamisCache()
        if past_key_values is None:
            hidden = self._read_whole(input_ids, attention_mask)
        elif isinstance(past_key_values, TamisCache):
            hidden = past_key_values.read(self.decoder, input_ids, attention_mask)
        else:
            raise ValueError(f"past_key_values must be a TamisCache, got {type(past_key_values).__name__}")
        logits = self.decoder.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)  # -100 is not counted
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output.to_tuple() if return_dict is False else output

    def _read_whole(self, ids_BS: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the hidden states of one pass; rows are moved to the left over their padding, and back."""
        if attention_mask is None or bool(attention_mask.all()):
            return self.decoder(ids_BS)[0]
        tokens = ids_BS.shape[1]
        column, shift = torch.arange(tokens, device=ids_BS.device), left_padding(attention_mask, right=True)[:, None]
        hidden = self.decoder(ids_BS.gather(1, (column + shift) % tokens))[0]
        return hidden.gather(1, ((column - shift) % tokens)[..., None].expand_as(hidden))

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, attention_mask: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        ids = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        passed = {key: kwargs.get(key) for key in ("past_key_values", "use_cache")}
        mask = None if attention_mask is None else attention_mask.to(self.device)
        logits_to_keep = kwargs.get("logits_to_keep") or 0
        return {"input_ids": ids.to(self.device), "attention_mask": mask, "logits_to_keep": logits_to_keep, **passed}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            return
        if generation_config.cache_implementation is not None:
            raise ValueError("cache_implementation is not supported: this model has one cache of its own, TamisCache")
        model_kwargs["past_key_values"] = TamisCache(max_cache_length + 1)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.decoder.embedding

    def _prepare(self, device: torch.device) -> None:
        """Build the rotary tables, which loading leaves empty and a change of dtype rounds; verify GPU kernels once."""
        if not HAS_TAMIS:
            return
        attention = self.decoder.blocks[0].attention
        cos = attention.rotary.cos
        if self.is_ready and cos.dtype == torch.float32 and cos.device == device:
            return
        model = self.decoder.config.model
        rotary = Rotary(model.d_k, model.rope_base, model.rope_scale, self.decoder.max_len).to(device)
        for block in self.decoder.blocks:
            block.attention.rotary = rotary
        layers = [block.attention for block in self.decoder.blocks if isinstance(block.attention, NSAAttention)]
        if device.type == "cuda" and layers:
            layer = layers[0]
            require_decode(device, self.dtype, layer.heads, layer.groups, layer.dim, layer.spec)
        self.is_ready = True


def left_padding(attention_mask: Tensor, right: bool = False) -> Tensor:
    """Return how many tokens of padding each row begins with; `right` allows more at its end."""
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have 2 dimensions [batch, tokens], got {list(attention_mask.shape)}")
    mask = attention_mask.long()
    padding, tokens = mask.argmax(dim=1), mask.sum(dim=1)
    ends = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    if bool((tokens == 0).any()):
        raise ValueError("attention_mask hides a whole row: give each prompt at least one token")
    if bool((tokens != ends - padding).any()) or (not right and bool((ends < mask.shape[1]).any())):
        where = "before or after its tokens" if right else "on the left, since the next token follows the last one"
        raise ValueError(f"attention_mask is not supported: pad each row {where}")
    return padding
