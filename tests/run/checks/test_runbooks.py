"""Criteria pass only on measurements, fail on a breach, and are not measured when the files show nothing."""

import errno
import json
import zipfile
from dataclasses import asdict, replace

import pytest
import torch

from tamis.config import load_config
from tamis.run.checks.criteria import checkpoints, gates, gpu, operation, selection, training
from tamis.run.checks.evidence import Evidence, read_evidence
from tamis.run.checks.findings import Criterion, Finding, has_failed, is_go, parse_findings, verdict
from tamis.run.checks.runbooks import RUNBOOKS, judge_run, judge_runbooks, summary
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog
from tamis.run.files.lock import RunLock
from tamis.run.files.manifest import write_manifest
from tamis.run.locate import NoSuchRun
from tamis.run.supervise.usage import UsageSample
from tests.run.fabricate import Story, fabricate


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Evidence:
    return read_evidence(fabricate(tmp_path_factory.mktemp("healthy"), steps=120, save_every=500))


@pytest.fixture
def nothing(tmp_path) -> Evidence:
    return read_evidence(tmp_path)


def with_losses(evidence: Evidence, losses: list[float]) -> Evidence:
    ends = [beat for beat in evidence.beats[0] if beat.phase == "step_end"]
    return replace(evidence, beats={0: [replace(b, loss=v) for b, v in zip(ends, losses, strict=False)]}, training=[])


def with_usage(evidence: Evidence, *percents: int) -> Evidence:
    moments = [beat.ts for beat in evidence.step_ends[0]]
    samples = [UsageSample(ts, gpu, 1, 2, percent) for ts in moments for gpu, percent in enumerate(percents)]
    return replace(evidence, usage=samples)


def test_no_criterion_passes_an_empty_directory(nothing):
    for book in RUNBOOKS:
        for criterion in book.criteria:
            assert criterion.apply(nothing).status != "pass", criterion.name


def test_a_verdict_that_cannot_be_stored_is_printed_and_counts(tmp_path, monkeypatch, capsys):
    def refused(path):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    run = fabricate(tmp_path, steps=5)
    monkeypatch.setattr("tamis.run.files.records.open_new", refused)
    assert judge_run(run.path) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"not written: {run.path / 'judgement.json'}: Read-only file system; use a folder")
    assert printed.out.splitlines()[-1].startswith("not successful: ")


def test_a_short_healthy_run_passes_what_it_measured(healthy):
    statuses = {f.name: f.status for findings in judge_runbooks(healthy).values() for f in findings}
    assert statuses["loss is falling"] == "pass"
    assert statuses["first 100 steps: throughput"] == "pass"
    assert statuses["trains for at least two hours"] == "fail"
    assert statuses["first 500 steps: gate entropy"] == "not applicable"
    assert statuses["phase 1: no stall, finite, steady, balanced"] == "not measured"


def test_two_hours_are_required_only_of_a_pilot_on_gpus(tmp_path, healthy):
    on_cpu = {r: [replace(b, gpu_mem_alloc_gib=None) for b in beats] for r, beats in healthy.beats.items()}
    found = operation.ran_long_enough(replace(healthy, beats=on_cpu))
    assert found.status == "not applicable"
    assert "are asked of a pilot on GPUs, and this run was on the CPU" in found.evidence
    long = read_evidence(fabricate(tmp_path, steps=5, step_s=3600))
    assert operation.ran_long_enough(long).status == "pass"


def test_a_production_run_that_did_all_its_steps_sooner_is_not_asked_for_two_hours(healthy):
    assert healthy.config
    production = healthy.config.model_copy(
        update={"runtime": healthy.config.runtime.model_copy(update={"production": True})}
    )
    found = operation.ran_long_enough(replace(healthy, config=production))
    assert (found.status, "did all its steps sooner" in found.evidence) == ("not applicable", True)
    longer = production.model_copy(update={"train": production.train.model_copy(update={"steps": 1000})})
    assert operation.ran_long_enough(replace(healthy, config=longer)).status == "fail"


def test_the_duration_of_a_running_run_is_not_measured(tmp_path):
    run = fabricate(tmp_path, steps=5)
    with RunLock(run.trainer_lock) as lock:
        lock.acquire("train")
        found = operation.ran_long_enough(read_evidence(run))
    assert (found.status, "still running" in found.evidence) == ("not measured", True)
    assert operation.ran_long_enough(read_evidence(run)).status == "fail"


def test_a_criterion_distinguishes_a_short_run_from_one_not_that_far_yet(tmp_path):
    def why(**story) -> str:
        findings = judge_runbooks(read_evidence(fabricate(tmp_path / str(story["planned_steps"]), steps=5, **story)))
        return next(f.evidence for f in findings["Launch plan (runbook 1)"] if f.name.startswith("first 500"))

    assert why(planned_steps=60) == "the run has 60 steps in all, fewer than 500"
    assert why(planned_steps=600) == "the run is at step 5, before step 500"


@pytest.mark.parametrize(
    ("losses", "falling", "finite"),
    [
        ([5, 4, 3, 2, 1, 1], "pass", "pass"),
        ([1, 2, 3, 4, 5, 6], "fail", "pass"),
        ([3, 3, 3, 3, 3, 3], "fail", "pass"),
        ([5, 4, float("nan"), 2, 1, 1], "pass", "fail"),
        ([5, 4, 3, 2, 1, float("inf")], "fail", "fail"),
        ([5, 4], "not measured", "pass"),
    ],
)
def test_the_loss_must_be_finite_and_fall(healthy, losses, falling, finite):
    evidence = with_losses(healthy, losses)
    assert training.loss_falling(evidence).status == falling
    assert training.loss_finite(evidence).status == finite


def test_a_run_that_stopped_short_is_not_completed(tmp_path, healthy):
    assert training.completed(healthy).status == "pass"
    short = read_evidence(fabricate(tmp_path, steps=20, planned_steps=60, ending=None))
    found = training.completed(short)
    assert found.status == "fail"
    assert "20 of 60" in found.evidence


def test_a_rank_without_heartbeats_is_named(tmp_path):
    run = fabricate(tmp_path, steps=5, processes=3)
    run.heartbeat(1).unlink()
    found = training.heartbeats_on_every_rank(read_evidence(run))
    assert found.status == "fail"
    assert "rank 1 of 3" in found.evidence


@pytest.mark.parametrize(("slow_every", "factor", "status"), [(0, 1, "pass"), (8, 2.5, "pass"), (8, 20, "fail")])
def test_step_times_must_be_steady(healthy, slow_every, factor, status):
    beats = [
        replace(beat, dt_step_s=0.5 * factor) if slow_every and beat.step % slow_every == 0 else beat
        for beat in healthy.beats[0]
    ]
    assert training.step_times_steady(replace(healthy, beats={0: beats})).status == status


def test_steps_that_become_slower_are_not_steady(healthy):
    beats = [replace(beat, dt_step_s=0.1 + beat.step / 100) for beat in healthy.beats[0]]
    assert training.step_times_steady(replace(healthy, beats={0: beats})).status == "fail"


@pytest.mark.parametrize(
    ("percents", "status"),
    [((95, 93), "pass"), ((100, 60), "fail"), ((79, 79), "fail"), ((99, 83), "fail"), ((), "not measured")],
)
def test_gpus_must_be_busy_and_balanced(healthy, percents, status):
    assert gpu.gpus_busy_and_balanced(with_usage(healthy, *percents)).status == status


@pytest.mark.parametrize(
    ("estimate", "status"), [(1024, "pass"), (900, "pass"), (1400, "fail"), (500, "fail"), (None, "not measured")]
)
def test_throughput_must_be_near_the_estimate_on_both_sides(healthy, estimate, status):
    evidence = replace(healthy, info=healthy.info | {"estimate_toks_per_s": estimate})
    assert training.throughput_near_estimate(evidence).status == status


def test_creeping_memory_is_not_flat_and_breaks_the_limit(tmp_path, healthy):
    assert gpu.memory_flat(healthy).status == "pass"
    creeping = read_evidence(fabricate(tmp_path, steps=60, memory_growth_gib=1.0))
    assert gpu.memory_flat(creeping).status == "fail"
    assert gpu.memory_under_limit(creeping).status == "fail"


def test_the_memory_limit_counts_gigabytes_not_gibibytes(healthy):
    beats = [replace(beat, gpu_mem_reserved_gib=58.0) for beat in healthy.beats[0]]  # 62.3 GB
    assert gpu.memory_under_limit(replace(healthy, beats={0: beats})).status == "fail"


@pytest.mark.parametrize(
    ("entropy", "collapse", "statuses"),
    [(0.9, 0.0, ("pass", "pass")), (0.4, 0.0, ("fail", "pass")), (0.9, 0.5, ("pass", "fail"))],
)
def test_gates_must_keep_entropy_and_not_collapse(tmp_path, entropy, collapse, statuses):
    evidence = read_evidence(fabricate(tmp_path, steps=10, entropy=entropy, collapse=collapse))
    found = gates.gate_entropy_healthy(evidence), gates.gates_not_collapsed(evidence)
    assert tuple(finding.status for finding in found) == statuses


def test_gates_that_stay_at_three_equal_parts_have_not_learned(healthy):
    ends = healthy.step_ends[0]
    moving = [replace(ends[0], step=1), replace(ends[-1], step=1000)]
    frozen = [replace(ends[0], step=1), replace(ends[0], step=1000)]
    assert gates.gates_have_learned(replace(healthy, beats={0: moving})).status == "pass"
    assert gates.gates_have_learned(replace(healthy, beats={0: frozen})).status == "fail"
    assert gates.gates_have_learned(healthy).status == "not measured"
    fewer_layers = [moving[0], replace(moving[1], gate_shares=moving[1].gate_shares[:1])]  # of a damaged file
    assert gates.gates_have_learned(replace(healthy, beats={0: fewer_layers})).status == "pass"


@pytest.mark.parametrize(("distinct", "status"), [(0.8, "pass"), (0.01, "fail")])
def test_selection_must_not_collapse_to_a_few_blocks(tmp_path, distinct, status):
    found = selection.selection_healthy(read_evidence(fabricate(tmp_path, steps=5, distinct=distinct)))
    assert (found.status, "likeness of neighbours 0.60" in found.evidence) == (status, True)


def test_the_dense_twin_has_no_gates_to_judge(tmp_path):
    evidence = read_evidence(fabricate(tmp_path, steps=5, attention="dense"))
    found = gates.gate_entropy_healthy(evidence)
    assert (found.status, found.evidence) == ("not applicable", "dense attention has no gates")
    assert selection.selection_healthy(evidence).status == "not applicable"


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = fabricate(tmp_path, steps=40)
    assert checkpoints.checkpoints_intact(read_evidence(run)).status == "pass"
    run.checkpoint(40).write_bytes(b"short")
    found = checkpoints.checkpoints_intact(read_evidence(run))
    assert found.status == "fail"
    assert "step 40" in found.evidence


def test_a_checkpoint_counts_as_loadable_only_when_it_loads(tmp_path, monkeypatch):
    run = fabricate(tmp_path, steps=20)
    found = checkpoints.newest_checkpoint_loads(read_evidence(run))
    assert (found.status, "not an archive" in found.evidence) == ("fail", True)
    with zipfile.ZipFile(run.checkpoint(20), "w") as archive:
        archive.writestr("other", "content")
    found = checkpoints.newest_checkpoint_loads(read_evidence(run))
    assert (found.status, "does not load" in found.evidence) == ("fail", True)
    config = read_evidence(run).config
    torch.save({"step": 20, "config": config.model_dump(), "model": {"w": torch.zeros(3)}}, run.checkpoint(20))
    write_manifest(run, 20, config_hash="x")
    assert checkpoints.newest_checkpoint_loads(read_evidence(run)).status == "pass"
    monkeypatch.setattr(checkpoints.subprocess, "run", None)
    assert checkpoints.newest_checkpoint_loads(read_evidence(run)).status == "pass", "an unchanged file is loaded once"


def test_a_watchdog_alarm_fails_the_run_and_a_note_does_not(tmp_path):
    run = fabricate(tmp_path, steps=5)
    log = EventLog(run, by="watchdog")
    log.record_alarm(Alarm("slow", "note", "slow"))
    assert operation.no_alarms(read_evidence(run)).status == "pass"
    log.record_alarm(Alarm("stuck_in_collective", "stall", "no progress for 200 s"))
    found = operation.no_alarms(read_evidence(run))
    assert found.status == "fail"
    assert "stuck_in_collective" in found.evidence


def test_a_resume_is_seen_in_the_heartbeats(tmp_path):
    run = fabricate(tmp_path, steps=20, ending=None)
    assert operation.resume_succeeded(read_evidence(run)).status == "not measured"
    fabricate(tmp_path, Story(steps=40, first_step=21, pid=77, starts_at=1_780_001_000.0))
    found = operation.resume_succeeded(read_evidence(run))
    assert found.status == "pass"
    assert "step 21" in found.evidence


def test_a_resume_that_starts_at_step_one_fails(tmp_path):
    run = fabricate(tmp_path, steps=20, ending=None)
    fabricate(tmp_path, Story(steps=20, pid=77, starts_at=1_780_001_000.0))
    assert operation.resume_succeeded(read_evidence(run)).status == "fail"


def test_an_nccl_error_in_the_log_is_quoted(tmp_path):
    run = fabricate(tmp_path, steps=3)
    run.train_log.write_text("fine\n[rank1]: torch.distributed.DistBackendError: NCCL error: unhandled\nfine\n")
    found = operation.no_cuda_or_nccl_errors(read_evidence(run))
    assert found.status == "fail"
    assert "DistBackendError" in found.evidence


def test_judging_stores_the_evidence_and_a_failure_gives_exit_code_one(tmp_path):
    run = fabricate(tmp_path / "out", steps=5)
    assert judge_run(run.path) == 1
    stored = json.loads((run.path / "judgement.json").read_text())
    assert len(stored["findings"]) == sum(len(book.criteria) for book in RUNBOOKS)
    assert all(finding["evidence"] for finding in stored["findings"])


def test_a_directory_without_a_run_is_neither_judged_nor_written_to(tmp_path):
    for path, why in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "holds no run")):
        with pytest.raises(NoSuchRun, match=why):
            judge_run(path)
    assert list(tmp_path.iterdir()) == []


def test_half_written_files_are_read_up_to_the_last_complete_line(tmp_path):
    run = fabricate(tmp_path, steps=10)
    with open(run.training_csv, "a") as file:
        file.write("11,2.")
    with open(run.events, "a") as file:
        file.write('{"ts": 1')
    evidence = read_evidence(run)
    assert [row.step for row in evidence.training][-1] == 10
    assert len(evidence.events) == 1


def test_a_go_needs_every_line_that_applies_to_be_measured():
    good, bad = Finding("pass", "1"), Finding("fail", "0")
    unknown, other = Finding("not measured", "?"), Finding("not applicable", "-")
    assert is_go([good])
    assert is_go([good, other])
    for findings in ([], [unknown], [other], [good, unknown], [good, bad]):
        assert not is_go(findings)
    assert verdict([good, good, *[unknown] * 9]) == "OPEN (2 passed, 9 not measured)"
    assert verdict([good, other]) == "GO (1 passed)"
    assert verdict([good, bad, unknown]) == "NO-GO (1 failed, 1 not measured)"


def test_a_showcase_that_reached_its_goals_ends_with_a_plain_success(tmp_path):
    run = fabricate(tmp_path, steps=60, on_gpus=False)
    results = judge_runbooks(read_evidence(run))
    every = [f for findings in results.values() for f in findings if "loaded" not in f.name]
    assert summary(every).startswith("success: all ")
    assert verdict(results["Goals of every run"]) == "GO (5 passed)"
    unfinished = read_evidence(
        fabricate(tmp_path / "halted", steps=60, planned_steps=90, ending="halted", on_gpus=False)
    )
    assert training.goal_reached(unfinished).status == "not measured"
    good, unknown, bad = Finding("pass", "1"), Finding("not measured", "?"), Finding("fail", "0", name="loss")
    assert summary([good, unknown]) == "open: 1 criterion passed, 1 was not measured"
    assert summary([good, good, unknown, unknown]) == "open: 2 criteria passed, 2 were not measured"
    assert summary([good, bad]) == "not successful: 1 criterion failed: loss"


def test_a_go_no_go_file_of_an_earlier_version_is_read():
    stored = [
        {"status": "pass", "evidence": "1", "at": None, "name": "n", "remedy": "", "is_needed": True},
        {"status": 7},
    ]
    assert parse_findings(stored) == [Finding("pass", "1", name="n")]


@pytest.mark.parametrize(
    ("csv", "board", "rows", "status"),
    [(False, True, False, "pass"), (False, False, False, "not applicable"), (True, True, False, "fail")],
)
def test_only_the_logs_that_the_config_asks_for_are_required(tmp_path, csv, board, rows, status):
    run = fabricate(tmp_path, steps=20)
    run.training_csv.unlink()
    keys = [f"train.csv={csv}".lower(), f"train.tensorboard={board}".lower()]
    run.config_yaml.write_text(load_config(run.config_yaml, keys).to_yaml())
    evidence = read_evidence(run)
    assert operation.logs_are_on(evidence).status == status
    assert training.throughput_stable(evidence).status == training.loss_falling(evidence).status == "pass"


@pytest.mark.parametrize(("total_mib", "limit"), [(81_920, "60 GB (train.max_memory_gb)"), (40_960, "40.8 GB (95%")])
def test_the_memory_limit_follows_the_size_of_the_gpu(healthy, total_mib, limit):
    usage = [UsageSample(1.0, 0, 1, total_mib, 90)]
    assert limit in gpu.memory_under_limit(replace(healthy, usage=usage)).evidence


def test_a_run_without_its_phases_has_no_go_for_production(tmp_path):
    production = judge_runbooks(read_evidence(fabricate(tmp_path, steps=40)))["Production (runbook 2)"]
    assert not has_failed(production)
    assert verdict(production) == "OPEN (4 passed, 3 not measured)"


def test_only_a_failure_carries_a_remedy():
    criterion = Criterion("name", lambda status: Finding(status, "evidence"), "try this")
    assert criterion.apply("fail").remedy == "try this"
    assert criterion.apply("pass").remedy == criterion.apply("not measured").remedy == ""


def test_reading_a_run_changes_nothing_in_it(tmp_path):
    run = fabricate(tmp_path, steps=5)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    judge_runbooks(read_evidence(RunDirectory(run.path)))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("statuses", "expected"), [(("pass", "not measured"), "not measured"), (("pass", "fail"), "fail")]
)
def test_a_phase_with_a_line_that_was_not_measured_has_not_failed(tmp_path, statuses, expected):
    run = fabricate(tmp_path, steps=40)
    findings = [Finding(status, "evidence", name="line") for status in statuses]
    texts = {"title": "t", "directory": str(tmp_path), "judged_at": "now", "key": "k", "verdict": verdict(findings)}
    record = {"phase": 1, "go": is_go(findings), "findings": [asdict(finding) for finding in findings], **texts}
    (run.path / "go_no_go.json").write_text(json.dumps({"phases": [record]}))
    production = judge_runbooks(read_evidence(run))["Production (runbook 2)"]
    assert next(f.status for f in production if f.name.startswith("phase 1")) == expected
