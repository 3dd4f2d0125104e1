"""An exported Tamis model for `transformers`. It needs the `tamis` package, which does all the computing.

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel  # type: ignore[import-not-found]
from transformers.modeling_outputs import CausalLMOutput  # type: ignore[import-not-found]

from tamis.attention.rotary import Rotary
from tamis.config import build_config
from tamis.model import Decoder


class TamisConfig(PretrainedConfig):
    model_type = "tamis"

    def __init__(self, tamis: dict[str, Any] | None = None, tamis_step: int = 0, **kwargs: Any) -> None:
        self.tamis, self.tamis_step = tamis or {}, tamis_step
        super().__init__(**kwargs)


class TamisForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TamisConfig

    def __init__(self, config: TamisConfig) -> None:
        super().__init__(config)
        self.tamis_config = build_config(config.tamis)
        self.decoder = Decoder(self.tamis_config, max_len=config.max_position_embeddings)
        self.positions_ready = False
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("padding is not supported: give prompts of one length, or one at a time")
        self._make_positions(input_ids.device)
        hidden, _statistics = self.decoder(input_ids)
        logits = self.decoder.logits(hidden)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Any = None, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _make_positions(self, device: torch.device) -> None:
        """Build the rotary tables at first use: they are no weights, and loading leaves them empty or rounds them."""
        if self.positions_ready:
            return
        model = self.tamis_config.model
        rotary = Rotary(model.d_k, model.rope_base, model.rope_scale, self.decoder.max_len).to(device)
        for block in self.decoder.blocks:
            block.attention.rotary = rotary  # type: ignore[union-attr]
        self.positions_ready = True
