"""env.json tells versions, GPUs and settings, and cannot tell a secret."""

import json
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from tamis.run.files.environment import RECORDED_VARIABLES, describe_environment, recorded_variables
from tamis.run.files.hardware import Gpu

SECRETS = {
    "HF_TOKEN": "hf_planted0secret0one",
    "AWS_SECRET_ACCESS_KEY": "planted0secret0two",
    "NSA_ACCESS_KEY": "planted0secret0three",
    "NCCL_PASSWORD": "planted0secret0four",
    "HF_DATASETS_CACHE": "https://user:planted0secret0five@example.invalid/cache",
}
GPU = Gpu(0, "Card 80", 81_920, 81_000, 0, "570.1")


def test_planted_secrets_never_reach_env_json():
    document = json.dumps(describe_environment([GPU], SECRETS | {"NSA_LR": "2e-4"}))
    assert "planted0secret" not in document
    assert '"NSA_LR": "2e-4"' in document


@given(st.dictionaries(st.sampled_from(RECORDED_VARIABLES) | st.text(min_size=1), st.text()))
def test_only_listed_names_are_ever_recorded(environment):
    assert set(recorded_variables(environment)) <= set(RECORDED_VARIABLES)


def test_the_allocator_setting_of_the_runbooks_is_recorded_as_it_is():
    setting = "max_split_size_mb:256,expandable_segments:True"
    assert recorded_variables({"PYTORCH_CUDA_ALLOC_CONF": setting}) == {"PYTORCH_CUDA_ALLOC_CONF": setting}


def test_versions_gpus_and_driver_are_there():
    described = describe_environment([GPU], {})
    assert described["driver"] == "570.1"
    assert described["gpus"][0]["total_mib"] == 81_920
    assert described["packages"]["torch"].startswith("2.")
    assert described["cpu"]["cores"] >= 1


def test_a_machine_without_gpu_records_its_driver_as_null():
    assert describe_environment([], {})["driver"] is None


def test_describing_the_environment_imports_no_torch():
    code = (
        "import sys; from tamis.run.files.environment import describe_environment as d; d([], {});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
