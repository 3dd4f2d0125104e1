"""Loading a trained model for generation, and the refusals of what cannot be one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import tamis
from tamis.config import Config, ConfigError, build_config
from tamis.generate.export import export_command
from tamis.generate.load import load_model
from tamis.generate.sample import gather_prompts, generate_command
from tamis.model import Decoder
from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory
from tests.generate.test_sample import small_config, small_model


def save(folder: Path, model: Decoder, step: int = 7, config: Config | None = None) -> Path:
    """A checkpoint as the trainer writes it, of a run whose optimizer has not stepped yet."""
    run = RunDirectory(folder).create()
    state = {"model": model.state_dict(), "config": (config or model.config).model_dump(), "step": step,
             "optimizer": {}, "rng": torch.get_rng_state()}  # fmt: skip
    torch.save(state, run.checkpoint(step))
    checkpoints.write_manifest(run, step, config_hash=model.config.hash)
    return run.checkpoint(step)


def test_a_checkpoint_gives_the_model_that_was_saved(tmp_path: Path) -> None:
    model = small_model()
    loaded = load_model(save(tmp_path, model), device="cpu")
    assert loaded.step == 7
    assert loaded.tokenizer.name == "byte"
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)


def test_a_run_directory_gives_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, small_model(), step=3)
    damaged = save(tmp_path, small_model(), step=9)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert load_model(tmp_path, device="cpu").step == 3


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, small_model())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="sha256"):
        load_model(path, device="cpu")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoint(1).write_bytes(b"not a checkpoint at all")
    checkpoints.write_manifest(run, 1, config_hash="0")
    with pytest.raises(ValueError, match="is not a checkpoint of this trainer"):
        load_model(run.checkpoint(1), device="cpu")


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        load_model(tmp_path)


def test_a_checkpoint_of_another_config_is_refused_with_the_key_that_differs(tmp_path: Path) -> None:
    path = save(tmp_path, small_model())
    tree = small_config().model_dump()
    tree["nsa"]["n_sel"] = 5
    with pytest.raises(ValueError, match=r"another config: it has nsa\.n_sel=4, the given config has 5"):
        load_model(path, expected=build_config(tree), device="cpu")


def test_weights_that_do_not_fit_their_config_are_refused(tmp_path: Path) -> None:
    tree = small_config().model_dump()
    tree["model"]["n_layers"] = 3
    path = save(tmp_path, small_model(), config=build_config(tree))
    with pytest.raises(ValueError, match="does not hold the model its config describes"):
        load_model(path, device="cpu")


def test_a_config_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    model = small_model()
    run = RunDirectory(tmp_path)
    state = {"model": model.state_dict(), "config": {"model": {"depth": 3}}, "step": 1}
    torch.save(state, run.checkpoint(1))
    checkpoints.write_manifest(run, 1, config_hash="0")
    with pytest.raises(ConfigError, match=r"model\.depth"):
        load_model(run.checkpoint(1), device="cpu")


def test_positions_can_be_scaled_and_the_length_raised_at_loading(tmp_path: Path) -> None:
    path = save(tmp_path, small_model())
    longer = load_model(path, max_len=300, rope_scale=4.0, device="cpu").model
    plain = load_model(path, device="cpu").model
    assert longer.max_len == 300
    rotary = longer.blocks[0].attention.rotary
    torch.testing.assert_close(rotary.cos[40], plain.blocks[0].attention.rotary.cos[10])


def test_half_precision_leaves_the_rotary_tables_exact(tmp_path: Path) -> None:
    model = load_model(save(tmp_path, small_model()), device="cpu", precision="bf16").model
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model.blocks[0].attention.rotary.cos.dtype == torch.float32


def test_the_command_streams_the_prompt_with_its_continuation(tmp_path: Path) -> None:
    out, notes = io.StringIO(), io.StringIO()
    generate_command(
        save(tmp_path, small_model()), ["Peace "], max_new_tokens=12, device="cpu", out=out, notes=notes, seed=2
    )
    assert out.getvalue().startswith("Peace ")
    assert len(out.getvalue()) > len("Peace \n")
    assert "step 7" in notes.getvalue()
    assert "tokens/s" in notes.getvalue()


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_printed(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="raise --max-len"):
        generate_command(save(tmp_path, small_model()), ["x"], max_new_tokens=96, device="cpu", out=out)
    assert out.getvalue() == ""


def test_the_command_continues_every_prompt_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("War\n\nThe Congress of the United States\n")
    out = io.StringIO()
    path = save(tmp_path, small_model())
    generate_command(path, None, file, max_new_tokens=5, device="cpu", out=out, notes=io.StringIO())
    assert "--- prompt 1 of 2\nWar" in out.getvalue()
    assert "--- prompt 2 of 2\nThe Congress of the United States" in out.getvalue()


@pytest.mark.parametrize(("prompts", "content"), [(None, "\n \n"), ([""], None), ([], None)])
def test_no_prompt_or_an_empty_one_is_refused(prompts, content, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    file = None
    if content is not None:
        file = tmp_path / "prompts.txt"
        file.write_text(content)
    with pytest.raises(ValueError, match=r"no prompt|prompt is empty"):
        gather_prompts(prompts, file)


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.txt cannot be read: No such file or directory$"):
        gather_prompts(None, tmp_path / "missing.txt")


@pytest.mark.parametrize("kind", ["folder", "safetensors"])
def test_what_convert_writes_is_loaded(kind: str, tmp_path: Path) -> None:
    from tamis.checkpoint.convert import convert_checkpoint

    model = small_model()
    name = "checkpoint_step7.pt" if kind == "folder" else "weights.safetensors"
    converted = convert_checkpoint(save(tmp_path / "a", model), tmp_path / "b" / name, kind)  # type: ignore[arg-type]
    loaded = load_model(converted, device="cpu")
    assert loaded.step == 7
    assert torch.equal(loaded.model.embedding.weight, model.embedding.weight)


def test_safetensors_of_another_origin_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a file that `tamis convert` wrote"):
        load_model(tmp_path / "other.safetensors")


@pytest.mark.parametrize("kind", ["run", "checkpoint", "exported"])
def test_tamis_load_gives_a_model_that_returns_logits_and_its_tokenizer(kind: str, tmp_path: Path) -> None:
    decoder = small_model()
    path = {"checkpoint": save(tmp_path / "run", decoder), "run": tmp_path / "run"}.get(kind)
    model, tokenizer = tamis.load(path or export_command(tmp_path / "run", tmp_path / "folder"), device="cpu")
    ids = tokenizer.encode("a sieve")[None]
    assert torch.equal(model(ids), decoder.logits(decoder(torch.from_numpy(ids).long())[0]))
    with pytest.raises(ValueError, match=r"ids must have 2 dimensions \[batch, tokens\]"):
        model(ids[0])


def test_the_snippet_of_the_inference_page_generates_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "artifacts" / "train_showcase", small_model())
    monkeypatch.chdir(tmp_path)
    page = (Path(tamis.__file__).parents[1] / "docs" / "inference.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0].replace("max_new_tokens=100", "max_new_tokens=5"), {})
    assert capsys.readouterr().out
