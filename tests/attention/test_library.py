"""What users of the library call: `nsa`, the layer and its caches, under the tools of PyTorch, and a light import."""

from __future__ import annotations

import copy
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tamis.attention
from tamis.attention import NSAAttention, NSASpec, nsa, nsa_attention, select_blocks
from tamis.attention.packing import PackedRow
from tests.attention import paper
from tests.train.processes import run_ranks

SPEC = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
ROOT = Path(__file__).parents[2]
IMPORT_NAMES = {"pyyaml": "yaml", "nvidia_ml_py": "pynvml"}
USE_THE_LAYER = """
import json, os, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it raises ImportError
before = dict(os.environ)
import tamis, tamis.attention
import torch
layer = tamis.attention.NSAAttention(16, 2, 1, 8, tamis.attention.NSASpec(8, 4, 8, 4, 12), max_len=64)
layer(torch.randn(1, 40, 16)).sum().backward()
own = [name for name in sys.modules if name.startswith("tamis.") and not name.startswith("tamis.attention")]
print(json.dumps({"own": own, "environment_changed": before != dict(os.environ)}))
"""


def inputs(tokens: int = 50) -> list[Tensor]:
    """Return q, k, v and gates of two sequences."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    return [q, k, v, torch.rand(2, tokens, 4, 3, generator=generator)]


def layer(**changes: object) -> NSAAttention:
    torch.manual_seed(0)
    module = NSAAttention(24, heads=4, kv_heads=2, head_dim=8, spec=SPEC, max_len=96, **changes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)  # every branch matters, so an error in one shows
    return module


def tokens(count: int = 60, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, 24, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 7, 8, 50])
def test_nsa_is_the_full_form_over_block_means(count: int) -> None:
    q, k, v, gates = inputs(count)
    blocks = range(SPEC.compressed_blocks(count))
    k_cmp, v_cmp = (
        torch.stack([x[:, 4 * i : 4 * i + 8].mean(dim=1) for i in blocks], dim=1) if blocks else x[:, :0]
        for x in (k, v)
    )
    expected = paper.attention(q, k_cmp, v_cmp, k, v, k, v, gates, SPEC)
    torch.testing.assert_close(nsa(q, k, v, gates, SPEC), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, SPEC), expected, rtol=1e-4, atol=1e-5)


def test_scale_multiplies_the_scores() -> None:
    q, k, v, gates = inputs()
    torch.testing.assert_close(nsa(q, k, v, gates, SPEC, scale=8**-0.5), nsa(q, k, v, gates, SPEC))
    doubled = nsa(2 * q, k, v, gates, SPEC)
    torch.testing.assert_close(nsa(q, k, v, gates, SPEC, scale=2 * 8**-0.5), doubled)


@pytest.mark.parametrize("swapped", ["qkv", "kv", "qkvg"])
def test_heads_before_tokens_are_named_as_such(swapped: str) -> None:
    arguments = [x.transpose(1, 2) if name in swapped else x for name, x in zip("qkvg", inputs(), strict=True)]
    with pytest.raises(
        ValueError, match=r"(has|have) the layout \[batch, (heads|groups), tokens, dim\].*transpose\(1, 2\)"
    ):
        nsa(*arguments, SPEC)


@pytest.mark.parametrize("phi", ["mlp", "avg"])
def test_prefill_and_steps_equal_one_pass_of_the_layer(phi: str) -> None:
    module, x = layer(phi=phi).eval(), tokens()
    cache = module.new_cache(2, 60)
    parts = [module.prefill(x[:, :25], cache), module.prefill(x[:, 25:40], cache)]
    parts += [module.step(x[:, t], cache)[:, None] for t in range(40, 60)]
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="61 tokens do not fit the cache of 60"):
        module.step(x[:, 0], cache)


@pytest.mark.parametrize("phi", ["mlp", "avg"])
def test_packed_documents_of_a_layer_attend_as_if_alone(phi: str) -> None:
    module, lengths = layer(phi=phi), [1, 33, 7, 19]
    x = tokens(sum(lengths), batch=1)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    alone = torch.cat([module(document) for document in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(module(x, cu_seqlens), alone, rtol=1e-4, atol=1e-5)


def test_packed_documents_of_nsa_attend_as_if_alone() -> None:
    lengths = [20, 1, 29]
    row = [x[:1] for x in inputs(50)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    alone = [nsa(*document, SPEC) for document in zip(*(x.split(lengths, dim=1) for x in row), strict=True)]
    packed = nsa(*row, SPEC, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
    assert torch.equal(nsa(*row, SPEC, cu_seqlens=PackedRow.of(cu_seqlens, 50, SPEC)), packed)
    with pytest.raises(ValueError, match="made for a row of 60 tokens, q has 50"):
        nsa(*row, SPEC, cu_seqlens=PackedRow.of(torch.tensor([0, 60], dtype=torch.int32), 60, SPEC))
    with pytest.raises(ValueError, match="one packed row"):
        nsa(*inputs(50), SPEC, cu_seqlens=cu_seqlens)


def test_a_wrong_size_is_named() -> None:
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads, got 4 and 3"):
        NSAAttention(24, 4, 3, 8, SPEC)
    with pytest.raises(ValueError, match="head_dim must be even"):
        NSAAttention(24, 4, 2, 7, SPEC)
    with pytest.raises(ValueError, match='phi must be "mlp" or "avg"'):
        NSAAttention(24, 4, 2, 8, SPEC, phi="max")
    for rope in ({"rope_scale": 0}, {"rope_scale": float("nan")}, {"rope_base": -1.0}):
        with pytest.raises(ValueError, match="rope_base and rope_scale must be finite numbers above 0"):
            layer(**rope)
    module, cache = layer(), layer().new_cache(2, 60)
    for call in (module, module.selected_blocks, lambda x: module.prefill(x, cache)):
        with pytest.raises(ValueError, match=r"x must have shape \[batch, tokens, 24\], got \[2, 60, 23\]"):
            call(tokens()[..., :23])
    with pytest.raises(ValueError, match=r"x must have shape \[batch, 24\], got \[2, 23\]"):
        module.step(tokens()[:, 0, :23], cache)
    with pytest.raises(ValueError, match="97 tokens are more than max_len=96"):
        layer()(tokens(97))


def test_layers_may_share_their_rotary_tables() -> None:
    first = layer()
    second = NSAAttention(24, 4, 2, 8, SPEC, rotary=first.rotary)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(tokens()), second(tokens()))
    assert not any("rotary" in name for name in first.state_dict())


def test_torch_compile_captures_the_layer_in_one_graph() -> None:
    torch._dynamo.reset()
    module, x = layer(), tokens()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_torch_compile_serves_every_packing_of_a_row_with_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(tamis.attention.layer, "nsa_attention", lambda q, *_, **__: q)  # the kernels are one op
    module, x = layer(), tokens(30, batch=1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for offsets in ([0, 10, 11, 30, 30], [0, 5, 20, 25, 30]):
        packing = torch.tensor(offsets, dtype=torch.int32)
        torch.testing.assert_close(compiled(x, packing), module(x, packing))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_autocast_computes_in_bf16_with_float32_gradients() -> None:
    module, x = layer(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out, chosen = module(x), module.selected_blocks(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())
    alike = (chosen == module.selected_blocks(x)).flatten(2).all(-1)
    assert alike.float().mean() > 0.98  # rounding decides between scores that are nearly equal
    torch.testing.assert_close(out.float()[alike], module(x)[alike], rtol=0.1, atol=0.1)


def test_activation_checkpointing_changes_no_bit() -> None:
    def gradients(call: object) -> list[Tensor]:
        module, x = layer(), tokens().requires_grad_()
        out = module(x) if call is None else checkpoint(module, x, use_reentrant=False)
        return list(torch.autograd.grad(out.sin().sum(), [x, *module.parameters()]))

    assert all(torch.equal(a, b) for a, b in zip(gradients(None), gradients(checkpoint), strict=True))


def sharded_gradients() -> None:
    """As one of two ranks: compare the layer under FSDP2 with the plain one."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    plain, sharded, x = layer(), layer(), tokens()
    fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    out = sharded(x)
    torch.testing.assert_close(out, plain(x))
    plain(x).square().sum().backward()
    out.square().sum().backward()
    for one, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)
    torch.distributed.destroy_process_group()


def test_fsdp2_shards_the_layer_with_the_same_gradients(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, sharded_gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_replays_forward_and_backward_of_the_layer() -> None:
    module = NSAAttention(128, heads=4, kv_heads=2, head_dim=32, spec=NSASpec(), max_len=2048).cuda().bfloat16()
    x = torch.randn(2, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    call = torch.cuda.make_graphed_callables(copy.deepcopy(module), (x,))
    for seed in range(2):
        torch.manual_seed(seed)
        fresh = torch.randn_like(x).requires_grad_()
        expected, got = (
            torch.autograd.grad(one(fresh).float().square().sum(), fresh)[0].float() for one in (module, call)
        )
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_the_page_documents_every_public_name() -> None:
    page = (ROOT / "docs" / "attention-api.md").read_text(encoding="utf-8")
    assert [name for name in tamis.attention.__all__ if f"## {name}\n" not in page] == []


def test_the_page_gives_every_argument_of_the_functions_and_of_the_layer() -> None:
    page = (ROOT / "docs" / "attention-api.md").read_text(encoding="utf-8")
    for call in (nsa, nsa_attention, select_blocks, NSAAttention):
        names = re.findall(r"\w+", page.split(f"= {call.__name__}(")[1].partition(")")[0])
        assert [name for name in inspect.signature(call).parameters if name not in names] == []


def test_importing_the_library_loads_no_package_but_torch_triton_and_numpy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {package(r) for r in project["dependencies"]} == {"torch", "triton", "numpy"}
    extras = project["optional-dependencies"]
    blocked = sorted(IMPORT_NAMES.get(name, name) for name in map(package, [*extras["train"], *extras["monitor"]]))
    assert {"pydantic", "yaml", "typer", "tiktoken", "safetensors", "textual"} <= set(blocked)
    done = subprocess.run([sys.executable, "-c", USE_THE_LAYER, *blocked], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"own": [], "environment_changed": False}


def package(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_-]", requirement)[0].replace("-", "_")
