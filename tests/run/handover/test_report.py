"""The report is one page that draws its curves in a real browser without network access, and escapes all text."""

import json
from pathlib import Path

import pytest

from tamis.run.checks.evidence import read_evidence
from tamis.run.checks.findings import Finding
from tamis.run.files.events import EventLog
from tamis.run.files.identity import ConfigChange, record_changes
from tamis.run.files.records import Sample, SampleLog
from tamis.run.handover.report import report_page
from tests.browser import browser_window, needs_chromium
from tests.run.fabricate import fabricate

RESULTS = {"Pilot": [Finding("pass", "5.1 → 2.2", name="loss is falling"), Finding("fail", "0.1 hours", name="length")]}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    run = fabricate(tmp_path_factory.mktemp("run"), steps=40)
    path = run.path / "report.html"
    path.write_text(report_page(read_evidence(run), RESULTS), encoding="utf-8")
    return path


def drawn_charts(text: str) -> list[dict]:
    return json.loads(text.partition("const charts = ")[2].partition(";\n")[0])


def test_the_page_loads_nothing_from_elsewhere(written):
    text = written.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    for tag in ("<script src", "<link", "<img", "<iframe", "@import"):
        assert tag not in text.split("<script>")[0]


def test_the_tables_hold_criteria_facts_and_checkpoints(written):
    text = written.read_text(encoding="utf-8")
    for shown in ("loss is falling", '<td class="fail">', "config_hash", "<h2>Checkpoints", "supervisor"):
        assert shown in text


def test_text_from_a_run_cannot_become_markup(tmp_path):
    run = fabricate(tmp_path, steps=3)
    nasty = "</script><script>alert(1)</script>"
    findings = {nasty: [Finding("pass", nasty, name=nasty)]}
    assert nasty not in report_page(read_evidence(run), findings)


def test_samples_and_evaluation_are_shown_and_escaped(tmp_path):
    run = fabricate(tmp_path, steps=3)
    SampleLog(run.samples).append([Sample(2, "Fellow", "<b>old"), Sample(3, "Fellow", "<b>citizens")])
    task = {"examples": 9, "shots": 2, "accuracy": 0.5, "standard_error": 0.1, "chance": 0.25, "centred": 0.3333}
    figures = {"step": 3, "bits_per_byte": 1.25, "mean_centred": 0.3333, "tasks": {"<arc>": task}, "limit": 9}
    figures["texts"] = {"README.md": {"step": 2, "bits_per_byte": 4.5}}
    run.eval_json.write_text(json.dumps(figures))
    text = report_page(read_evidence(run), {})
    assert text.index("&lt;b&gt;citizens") < text.index("&lt;b&gt;old")
    for shown in ("&lt;arc&gt;", "1.25 bits per byte", "Mean of the centred scores: 0.3333", "first 9 examples"):
        assert shown in text
    assert "1.25 bits per byte on held-out text" in text
    assert "4.5 bits per byte on the text README.md, step 2." in text
    for odd in ("[", "[1]", '{"tasks": {"a": 3}}', '{"tasks": 3}'):
        run.eval_json.write_text(odd)
        assert "<h2>Evaluation" not in report_page(read_evidence(run), {})


def test_changed_hyperparameters_are_marked_on_the_curves_over_steps(tmp_path):
    run = fabricate(tmp_path, steps=40)
    changes = [ConfigChange("train.lr", 2e-4, 1e-4)]
    record_changes(EventLog(run, by="trainer"), changes, 21)
    text = report_page(read_evidence(run), {})
    charts = drawn_charts(text)
    assert all(chart["layout"]["shapes"][0]["x0"] == 21 for chart in charts)
    assert "train.lr: 0.0002 → 0.0001" in charts[0]["layout"]["annotations"][0]["hovertext"]


def test_the_page_opens_with_what_matters(written):
    top = written.read_text(encoding="utf-8").partition("<h2>Curves")[0]
    for shown in ("validation loss", "perplexity", "40 of 40 steps", "tokens per second", "not successful", "length"):
        assert shown in top


def test_a_second_run_is_drawn_dashed_and_compared(tmp_path):
    run, other = (fabricate(tmp_path / name, steps=steps) for name, steps in (("nsa", 40), ("dense", 30)))
    text = report_page(read_evidence(run), {}, against=read_evidence(other))
    names = [trace["name"] for trace in drawn_charts(text)[0]["data"]]
    assert names == ["training", "validation", "training, dense", "validation, dense"]
    assert "30 of 30 steps" not in text and text.index("<td>open</td>") > text.index("this run")


def test_an_empty_directory_still_gives_a_page(tmp_path):
    assert "Nothing was logged" in report_page(read_evidence(tmp_path), {})


@needs_chromium
def test_a_real_browser_draws_every_chart_without_error_or_request(written):
    problems: list[str] = []
    requests: list[str] = []
    with browser_window(problems, requests) as window:
        window.goto(written.as_uri())
        window.wait_for_selector("#chart8 .gtitle")  # of the last one
        places = window.locator(".chart").count()
        drawn = window.locator(".chart .scatterlayer .trace").count()
        titles = window.locator(".chart .gtitle").all_text_contents()
    assert problems == []
    assert requests == [written.as_uri()]
    assert places == len(titles) == 9
    assert titles[0] == "Loss"
    assert drawn >= places
