"""The runbooks' variables and flags: each has its effect, which is printed, and none is ignored."""

import ast
from pathlib import Path

import pytest

from tamis.config import ConfigError, build_config, known_keys
from tamis.config.legacy import FLAGS, PASSED_ON, VARIABLES, parse, variable_overrides

ROOT = Path(__file__).parents[2]
SHOWCASE = str(ROOT / "configs" / "train_showcase.yaml")

# A value for every variable of the contract, and what it must lead to.
EFFECTS = {
    "NSA_PREFILL_BATCHED": ("1", None, None),
    "NSA_SEL_RANGES_V2": ("1", None, None),
    "NSA_DDP_COMPRESS": ("bf16", "runtime.ddp_compress", "bf16"),
    "NSA_DDP_BUCKET_MB": ("50", "runtime.ddp_bucket_mb", 50),
    "NSA_DDP_STATIC_GRAPH": ("0", "runtime.ddp_static_graph", False),
    "NSA_DDP_FIND_UNUSED": ("1", "runtime.ddp_find_unused", True),
    "NSA_DDP_DISABLE_GC": ("1", "runtime.ddp_disable_gc", True),
    "NSA_DDP_SAFE_MODE": ("1", "runtime.ddp_safe_mode", True),
    "NSA_DISABLE_AUX_STATS": ("1", "train.aux_stats", False),
    "NSA_TB_DISABLE": ("1", "train.tensorboard", False),
    "NSA_DISABLE_CSV_LOGS": ("1", "train.csv", False),
    "NSA_ACCUM": ("2", "train.accumulate_grad_batches", 2),
    "NSA_LR": ("1e-4", "train.lr", 1e-4),
    "NSA_MEM_DUMP_EVERY": ("100", "runtime.mem_dump_every", 100),
    "NSA_NVTX": ("1", "runtime.nvtx", True),
    "NSA_SDPA_AUDIT": ("1", "runtime.sdpa_audit", True),
    "NSA_USE_FA2": ("0", "runtime.use_flash", False),
    "NSA_SDPA_NO_FLASH": ("1", "runtime.sdpa", "no_flash"),
    "NSA_SDPA_FLASH_ONLY": ("1", "runtime.sdpa", "flash_only"),
    "NSA_SCALER_INIT_SCALE": ("1024", "runtime.scaler_init_scale", 1024.0),
    "NSA_SCALER_GROWTH_INTERVAL": ("100", "runtime.scaler_growth_interval", 100),
    "NSA_SCALER_GROWTH_FACTOR": ("4.0", "runtime.scaler_growth_factor", 4.0),
    "NSA_SCALER_BACKOFF_FACTOR": ("0.25", "runtime.scaler_backoff_factor", 0.25),
}


def parsed(*argv: str, **environment: str):
    return parse(["--config", SHOWCASE, *argv], environment)


def value_of(config, dotted: str):
    section, _, key = dotted.partition(".")
    return getattr(getattr(config, section), key)


def test_every_variable_of_the_contract_is_known() -> None:
    assert set(EFFECTS) == set(VARIABLES)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_variable_sets_its_key_and_its_effect_is_printed(name: str) -> None:
    text, key, value = EFFECTS[name]
    request = parsed(**{name: text})
    (line,) = request.effects
    assert line.startswith(f"{name}={text}: ")
    if key is None:
        assert "nothing left to choose" in line
        assert request.config == parsed().config
    else:
        assert key in line
        assert value_of(request.config, key) == value != value_of(parsed().config, key)


def test_nccl_version_of_cuda_images_is_not_reported() -> None:
    assert variable_overrides({"NCCL_VERSION": "2.28.3-1"}) == ([], [])


@pytest.mark.parametrize("name", [*PASSED_ON, "NCCL_P2P_DISABLE", "NCCL_ALGO"])
def test_variables_of_other_tools_are_printed_and_passed_on(name: str) -> None:
    overrides, effects = variable_overrides({name: "1"})
    assert overrides == []
    assert effects[0].startswith(f"{name}=1: ")


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="NSA_DDP_BUKET_MB; did you mean NSA_DDP_BUCKET_MB"):
        variable_overrides({"NSA_DDP_BUKET_MB": "25"})


@pytest.mark.parametrize(("name", "text"), [("NSA_ACCUM", "two"), ("NSA_ACCUM", "0"), ("NSA_DDP_COMPRESS", "int8")])
def test_an_invalid_value_is_an_error_with_the_variables_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={text}: "):
        variable_overrides({name: text})


def test_contradicting_variables_are_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match="NSA_SDPA_FLASH_ONLY and NSA_SDPA_NO_FLASH contradict"):
        variable_overrides({"NSA_SDPA_FLASH_ONLY": "1", "NSA_SDPA_NO_FLASH": "1"})


@pytest.mark.parametrize("name", ["NSA_SDPA_NO_FLASH", "NSA_SDPA_FLASH_ONLY"])
def test_a_switch_that_is_off_leaves_the_key_as_configured(name: str) -> None:
    overrides, effects = variable_overrides({name: "0"})
    assert overrides == []
    assert "stays as configured" in effects[0]


def test_an_empty_variable_has_no_effect() -> None:
    assert variable_overrides({"NSA_LR": "", "NSA_ACCUM": ""})[0] == []


def test_an_empty_compression_means_none() -> None:
    assert variable_overrides({"NSA_DDP_COMPRESS": ""})[0] == ["runtime.ddp_compress=none"]


def test_no_variable_reaches_what_attention_computes() -> None:
    assert not {v.key for v in VARIABLES.values() if v.key and v.key.startswith(("model.", "nsa."))}


FLAG_VALUES = {
    "--dataset": ("synthetic", "synthetic"),
    "--steps": ("7", 7),
    "--precision": ("bf16", "bf16"),
    "--loader-timeout": ("5", 5.0),
    "--local-path": ("here", "here"),
    "--seq-len": ("99", 99),
    "--batch-size": ("3", 3),
    "--accum-batches": ("2", 2),
}


def test_every_flag_is_tried() -> None:
    assert set(FLAG_VALUES) == set(FLAGS)


@pytest.mark.parametrize("flag", FLAG_VALUES)
def test_a_flag_sets_its_key(flag: str) -> None:
    text, value = FLAG_VALUES[flag]
    assert value_of(parsed(flag, text).config, FLAGS[flag][0]) == value


def test_switches_are_honoured(tmp_path: Path) -> None:
    thrifty = tmp_path / "thrifty.yaml"
    thrifty.write_text("runtime: {gradient_checkpointing: true}\n")
    assert parse(["--config", str(thrifty)], {}).config.runtime.gradient_checkpointing is True
    assert parse(["--config", str(thrifty), "--no-gc"], {}).config.runtime.gradient_checkpointing is False
    assert parsed("--synthetic-on-fail").config.data.synthetic_on_fail is True
    assert parsed("--resume", "auto").resume == "auto"
    assert parsed("--save", "out.pt").save == "out.pt"


@pytest.mark.parametrize("flag", ["--stepz", "--step", "--prec"])
def test_an_unknown_or_shortened_flag_is_an_error(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown flag {flag}.*--help lists them all"):
        parsed(flag, "1")


def test_a_mistyped_flag_is_answered_with_the_nearest_and_a_wrong_value_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="unknown flag --setps; did you mean --steps"):
        parsed("--setps", "1")
    with pytest.raises(ConfigError, match=r"argument --ddp: invalid choice: '2' \(choose from"):
        parsed("--ddp", "2")


def test_single_keys_win_over_flags_and_flags_over_variables_and_variables_over_the_file() -> None:
    assert parsed(NSA_ACCUM="2").config.train.accumulate_grad_batches == 2
    assert parsed("--accum-batches", "3", NSA_ACCUM="2").config.train.accumulate_grad_batches == 3
    last = parsed("--accum-batches", "3", "train.accumulate_grad_batches=4", NSA_ACCUM="2")
    assert last.config.train.accumulate_grad_batches == 4


def test_flags_replace_tokens_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {tokens: 1.0e+6, batch_tokens: 4096}\n")
    argv = ["--config", str(file), "--steps", "3", "--accum-batches", "2"]
    train = parse(argv, {"NSA_ACCUM": "5"}).config.with_steps(1).train
    assert (train.steps, train.accumulate_grad_batches) == (3, 2)


def test_the_config_comes_from_the_flag_then_the_variable_then_the_showcase(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert parse([], {}).config.model.name == "showcase"
    other = str(ROOT / "configs" / "m7c_125m_40g.yaml")
    assert parse([], {"CONFIG": other}).config_path == other
    assert parse(["--config", SHOWCASE], {"CONFIG": other}).config_path == SHOWCASE


def test_the_ddp_flag_must_match_how_the_process_was_started() -> None:
    with pytest.raises(ConfigError, match="torchrun started 2"):
        parsed("--ddp", "0", WORLD_SIZE="2", RANK="0")
    with pytest.raises(ConfigError, match="needs torchrun"):
        parsed("--ddp", "1")
    parsed("--ddp", "0")
    parsed("--ddp", "1", WORLD_SIZE="2", RANK="1")


def test_noise_instead_of_data_is_refused_in_production() -> None:
    production = str(ROOT / "configs" / "m7c_125m_2xa100_production.yaml")
    with pytest.raises(ConfigError, match="synthetic_on_fail must be false"):
        parse(["--config", production, "--synthetic-on-fail"], {})


def test_the_page_of_variables_lists_the_table() -> None:
    rows = (ROOT / "docs" / "variables.md").read_text().splitlines()
    for name, variable in VARIABLES.items():
        key = f"`{variable.key}`" if variable.key else "–"
        assert f"| `{name}` | {key} | {variable.does} |" in rows
    for name, does in PASSED_ON.items():
        assert f"| `{name}` | – | {does} |" in rows


def test_every_key_that_a_file_may_hold_is_read_by_something() -> None:
    read: set[str] = set()
    for path in (ROOT / "tamis").rglob("*.py"):
        if path.name not in ("config.py", "legacy.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert [key for key in known_keys() if key.partition(".")[2] not in read] == []


def test_the_table_holds_only_keys_that_exist() -> None:
    assert {v.key for v in VARIABLES.values() if v.key} | {key for key, _ in FLAGS.values()} <= set(known_keys())
    assert build_config({}).train.csv is True
