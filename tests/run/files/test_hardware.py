"""From GPUs to config, process count and NCCL settings, with NVML played by a stand-in."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.config import load_config
from tamis.run import launch
from tamis.run.files.hardware import MIB, Gpu, GpuLost, free_disk_mib, read_gpus
from tamis.run.files.info import read_info
from tamis.run.plan import choose_config, launch_plan, nccl_environment
from tamis.run.supervise.worker_processes import trainer_command

CARD_MIB = {
    "24": 24_564,
    "40": 40_960,
    "80": 81_559,
    "141": 143_771,
}  # as NVML reports the cards sold under these sizes


class FakeNvml:
    """The handful of NVML calls we use, over a list of (name, total MiB)."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(
        self, cards, *, driver_loaded=True, nvlink=False, tells_utilisation=True, lost=(), reasons=0, limit_w=700
    ):
        self.cards, self.driver_loaded, self.lost = cards, driver_loaded, lost
        self.nvlink, self.tells_utilisation = nvlink, tells_utilisation
        self.reasons, self.limit_w = reasons, limit_w
        self.is_open = False

    def nvmlInit(self):
        if not self.driver_loaded:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlSystemGetDriverVersion(self):
        return b"570.124.06"  # older bindings return bytes

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle):
        return self.cards[handle][0]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle:04d}-abcd"

    def nvmlDeviceGetMemoryInfo(self, handle):
        total = self.cards[handle][1] * MIB
        return SimpleNamespace(total=total, free=total - 500 * MIB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if not self.tells_utilisation:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if not self.nvlink:
            raise self.NVMLError("Not Supported")
        return 1

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return {self.NVML_CLOCK_SM: 1695}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return {self.NVML_CLOCK_SM: 1980}[clock]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 698_734

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self.limit_w * 1000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 700_000

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return {self.NVML_TEMPERATURE_GPU: 61}[sensor]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons


class OlderNvml(FakeNvml):
    """Bindings without the newer name, and a driver that leaves most questions without an answer."""

    nvmlDeviceGetCurrentClocksEventReasons = property()  # an AttributeError, as for a name that does not exist

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def _is_refused(self, *arguments):
        raise self.NVMLError("Not Supported")

    nvmlDeviceGetClockInfo = nvmlDeviceGetMaxClockInfo = nvmlDeviceGetPowerUsage = _is_refused
    nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetTemperature = _is_refused


class OlderDriver(FakeNvml):
    """A driver that lacks what newer bindings ask for first."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        raise self.NVMLError("Function Not Found")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons


def machine(*sizes: str, **options) -> list[Gpu]:
    return read_gpus(FakeNvml([(f"Card {size}", CARD_MIB[size]) for size in sizes], **options), {})


def test_a_gpu_is_read_with_its_memory_utilisation_and_driver():
    nvml = FakeNvml([("NVIDIA A100 80GB PCIe", 81_920)])
    (gpu,) = read_gpus(nvml, {})
    assert (gpu.name, gpu.total_mib, gpu.free_mib, gpu.used_mib) == ("NVIDIA A100 80GB PCIe", 81_920, 81_420, 500)
    assert (gpu.utilisation_percent, gpu.driver, gpu.nvlink) == (37, "570.124.06", False)
    assert not nvml.is_open


def test_a_machine_without_driver_has_no_gpus():
    assert read_gpus(FakeNvml([], driver_loaded=False), {}) == []


def test_a_driver_without_utilisation_is_not_read_as_idle():
    assert machine("80", tells_utilisation=False)[0].utilisation_percent is None


def test_clock_power_and_temperature_are_read():
    speed = machine("141")[0].speed
    assert (speed.clock_mhz, speed.top_clock_mhz, speed.temperature_c) == (1695, 1980, 61)
    assert (speed.power_w, speed.power_limit_w, speed.default_power_limit_w) == (699, 700, 700)
    assert (speed.slowed_by, speed.slowed_or_limited) == ((), "")


@pytest.mark.parametrize(
    ("reasons", "slowed_by", "words"),
    [
        (0x01, (), ""),  # idle
        (0x04, ("power limit",), ""),  # a busy GPU
        (0x10 | 0x100, (), ""),  # the clocks of a group of GPUs, and of a display
        (0x20, ("heat",), "slowed by heat"),
        (0x40 | 0x08, ("heat",), "slowed by heat"),  # protection, and from what
        (0x80 | 0x08 | 0x04, ("power brake", "power limit"), "slowed by power brake"),
        (0x08, ("hardware protection",), ""),  # for a moment, also while the clock changes
        (0x60 | 0x80, ("heat", "power brake"), "slowed by heat and power brake"),
    ],
)
@pytest.mark.parametrize("nvml", [FakeNvml, OlderNvml, OlderDriver])
def test_what_slows_a_gpu_down_is_named(nvml, reasons, slowed_by, words):
    (gpu,) = read_gpus(nvml([("Card", 81_920)], reasons=reasons), {})
    assert (gpu.speed.slowed_by, gpu.speed.slowed_or_limited) == (slowed_by, words)


def test_what_the_driver_does_not_tell_stays_unknown():
    speed = read_gpus(OlderNvml([("Card", 81_920)], limit_w=300), {})[0].speed
    assert (speed.clock_mhz, speed.power_w, speed.power_limit_w, speed.temperature_c) == (None,) * 4
    assert speed.slowed_or_limited == ""


def test_a_power_limit_below_the_default_is_named_before_anything_starts():
    gpus = machine("80", "80", limit_w=350)
    assert gpus[1].speed.slowed_or_limited == "limited to 350 of 700 W"
    assert "GPU 1 is limited to 350 of 700 W: expect less speed" in launch_plan(gpus, environment={}).reasons
    assert not any("expect" in reason for reason in launch_plan(machine("80"), environment={}).reasons)


def test_a_lost_gpu_is_an_error_and_not_a_smaller_machine():
    nvml = FakeNvml([("Card", 81_920)] * 3, lost=(1,))
    with pytest.raises(GpuLost, match="GPU 1 does not answer"):
        read_gpus(nvml, {})
    assert not nvml.is_open
    assert [gpu.index for gpu in read_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "0,2"})] == [0, 2]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("1", [1]), ("2,0", [2, 0]), ("", []), ("-1", []), ("0,9,1", [0]), ("GPU-0002", [2])],
)
def test_cuda_visible_devices_narrows_the_gpus_as_cuda_does(visible, indices):
    nvml = FakeNvml([("Card", 81_920)] * 3)
    assert [gpu.index for gpu in read_gpus(nvml, {"CUDA_VISIBLE_DEVICES": visible})] == indices


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ([], "configs/train_showcase.yaml"),
        (["24"], "configs/m7c_125m_24g.yaml"),
        (["40"], "configs/m7c_125m_40g.yaml"),
        (["80"], "configs/m7c_125m_80g.yaml"),
        (["141"], "configs/m7c_125m_80g.yaml"),
        (["80", "24"], "configs/m7c_125m_24g.yaml"),
        (["141", "40"], "configs/m7c_125m_40g.yaml"),
        (["141", "80"], "configs/m7c_125m_80g.yaml"),
        (["80"] * 8, "configs/m7c_125m_80g.yaml"),
    ],
)
def test_the_smallest_gpu_decides_the_config(sizes, config):
    assert choose_config(machine(*sizes)) == config


@pytest.mark.parametrize(
    ("mib", "config"), [(75_000, "80g"), (74_999, "40g"), (35_000, "40g"), (34_999, "24g"), (1, "24g")]
)
def test_the_memory_limits_are_exact(mib, config):
    assert choose_config(read_gpus(FakeNvml([("Card", mib)]), {})) == f"configs/m7c_125m_{config}.yaml"


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=8), st.integers(1, 200_000))
def test_adding_a_gpu_never_chooses_a_larger_config(sizes, another):
    order = [f"configs/m7c_125m_{size}g.yaml" for size in (24, 40, 80)]
    before = choose_config(read_gpus(FakeNvml([("Card", mib) for mib in sizes]), {}))
    after = choose_config(read_gpus(FakeNvml([("Card", mib) for mib in [*sizes, another]]), {}))
    assert order.index(after) <= order.index(before)


@pytest.mark.parametrize("count", [0, 1])
def test_no_gpu_or_one_gpu_launches_plain_python(count):
    plan = launch_plan(machine(*["80"] * count), environment={})
    command = trainer_command(Path("c.yaml"), plan.processes, None)
    assert plan.processes == 1
    assert command[0] == sys.executable
    assert "tamis.train.tools.torchrun" not in command
    assert command[-4:] == ["-m", "tamis.train.main", "--config", "c.yaml"]


@pytest.mark.parametrize("count", [2, 8])
def test_several_gpus_launch_torchrun_with_every_gpu(count):
    plan = launch_plan(machine(*["40"] * count), environment={})
    command = trainer_command(Path("c.yaml"), plan.processes, None)
    assert plan.processes == count
    assert command[0] == sys.executable  # this very interpreter, so that no other torch can slip in
    assert "tamis.train.tools.torchrun" in command
    assert command[command.index("--nproc_per_node") + 1] == str(count)
    assert command[-4:] == ["-m", "tamis.train.main", "--config", "c.yaml"]


def test_without_a_gpu_the_showcase_runs_and_the_reason_is_printed():
    plan = launch_plan([], environment={})
    assert plan.config_path == "configs/train_showcase.yaml"
    assert "no GPU found" in plan.reasons[0]
    assert plan.environment == {}


def test_a_config_the_user_gives_wins_over_the_choice():
    assert launch_plan(machine("80"), config_path="mine.yaml", environment={}).config_path == "mine.yaml"


def test_pcie_machines_get_the_robust_nccl_settings():
    assert nccl_environment(machine("80", "80"), {}) == {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }


def test_nvlink_keeps_its_peer_copies():
    settings = nccl_environment(machine("80", "80", nvlink=True), {})
    assert "NCCL_P2P_DISABLE" not in settings
    assert settings["NCCL_IB_DISABLE"] == "1"


def test_nccl_settings_of_the_user_are_never_overridden():
    settings = nccl_environment(machine("80", "80"), {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"})
    assert not {"NCCL_P2P_DISABLE", "NCCL_DEBUG"} & settings.keys()


def test_free_disk_is_asked_of_the_nearest_folder_that_exists(tmp_path):
    assert free_disk_mib(tmp_path / "not" / "yet" / "there") == pytest.approx(free_disk_mib(tmp_path), abs=200)


@pytest.mark.parametrize(
    ("sizes", "config", "smokes"),
    [
        ([], "train_showcase", False),
        (["24"], "m7c_125m_24g", True),
        (["80"] * 2, "m7c_125m_80g", True),
        (["141", "40"], "m7c_125m_40g", True),
        (["141"] * 8, "m7c_125m_80g", True),
    ],
)
def test_the_main_job_launches_what_the_hardware_decides(monkeypatch, tmp_path, sizes, config, smokes):
    launched = []

    def supervise(config, *, processes, log, **options):
        launched.append((config, processes, log.name))
        return 0

    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(launch.os, "environ", {})
    monkeypatch.setattr(launch, "run_preflight", lambda *words, **options: 0)
    monkeypatch.setattr(launch, "read_gpus", lambda: machine(*sizes))
    monkeypatch.setattr(launch, "supervise", supervise)
    monkeypatch.setattr(launch, "LAUNCH_LOGS", tmp_path / "train_runs")
    monkeypatch.setattr(launch, "finish_run", lambda *arguments: 0)
    assert launch.main_job(None, [f"train.out_dir={tmp_path / 'out'}"]) == 0
    expected = load_config(f"configs/{config}.yaml", [f"train.out_dir={tmp_path / 'out'}"])
    assert launched[-1] == (expected, max(1, len(sizes)), "train.log")
    assert [log for _, _, log in launched[:-1]] == (["smoke.log"] if smokes else [])
    assert {processes for _, processes, _ in launched} == {max(1, len(sizes))}
    info = read_info(tmp_path / "out" / "run.info")
    assert (info["config"], info["gpu_count"]) == (f"configs/{config}.yaml", len(sizes))


def test_a_failed_smoke_test_stops_the_main_job(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(launch.os, "environ", {})
    monkeypatch.setattr(launch, "run_preflight", lambda *words, **options: 0)
    monkeypatch.setattr(launch, "read_gpus", lambda: machine("80"))
    monkeypatch.setattr(
        launch, "supervise", lambda config, *, log, **options: 5 if log.name == "smoke.log" else pytest.fail()
    )
    monkeypatch.setattr(launch, "LAUNCH_LOGS", tmp_path / "train_runs")
    assert launch.main_job(None, [f"train.out_dir={tmp_path / 'out'}"]) == 5
    assert "smoke.log" in capsys.readouterr().out


def test_gpus_that_this_torch_cannot_use_stop_the_main_job_before_anything_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(launch.os, "environ", {})
    monkeypatch.setattr(launch, "read_gpus", lambda: machine("80"))
    monkeypatch.setattr("tamis.run.checks.machine.cuda_of_torch", lambda: "13.0")  # needs a newer driver than 570
    monkeypatch.setattr(launch, "supervise", lambda *words, **options: pytest.fail("nothing may start"))
    monkeypatch.setattr(launch, "LAUNCH_LOGS", tmp_path / "train_runs")
    assert launch.main_job(None, [f"train.out_dir={tmp_path / 'out'}"]) == 1
    said = capsys.readouterr().out
    assert "not launched: the preflight failed" in said and "driver" in said
    assert not (tmp_path / "out" / "run.info").exists()
