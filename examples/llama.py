"""Replace the attention of a Hugging Face Llama by NSA: its projections stay, and each layer gains gates."""

import torch
from torch import Tensor, nn

from tamis.attention import NSASpec, nsa

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: this example needs it, pip install transformers") from None

SPEC = NSASpec(l=16, d=8, l_sel=32, n_sel=4, w=64)


class NSALlamaAttention(nn.Module):
    """LlamaAttention with its softmax replaced by NSA; for training and evaluation without a key/value cache."""

    def __init__(self, original: LlamaAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = original.q_proj, original.k_proj, original.v_proj
        self.o_proj, self.head_dim = original.o_proj, original.head_dim
        heads = self.q_proj.out_features // self.head_dim
        self.gate = nn.Linear(self.q_proj.in_features, 3 * heads)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in projections)  # [B, S, heads, D]
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        gates = torch.sigmoid(self.gate(hidden_states)).unflatten(-1, (-1, 3))
        return self.o_proj(nsa(q, k, v, gates, SPEC).flatten(2)), None


def use_nsa(model: LlamaForCausalLM) -> LlamaForCausalLM:
    for layer in model.model.layers:
        layer.self_attn = NSALlamaAttention(layer.self_attn)
    model.config.use_cache = False
    return model


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
model = use_nsa(LlamaForCausalLM(config))
ids = torch.randint(64, (2, 200))
loss = model(ids, labels=ids).loss
loss.backward()
missing = [name for name, p in model.named_parameters() if p.grad is None]
print(f"loss {loss.item():.3f}; parameters without a gradient: {missing}")
