"""Verbs that watch runs and hand them over: list, status, logs, monitor, remote, notify, judge, report, handoff."""

from __future__ import annotations

from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.common import WATCH, RunDir, Verb, Verbs, Words, resolve
from tamis.run.files.console import announced, counted, print_line

app = typer.Typer()
verb = partial(app.command, cls=Verb, rich_help_panel=WATCH)

NewestRun = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="a run's directory, its train.out_dir; by default the newest run")
]

NOTIFY_HELP = """Send messages about runs.

Example: tamis notify test notify.to=ntfy://my-topic
"""
notify_app = typer.Typer(cls=Verbs, no_args_is_help=True, help=NOTIFY_HELP)
app.add_typer(notify_app, name="notify", rich_help_panel=WATCH)
notify_verb = partial(notify_app.command, cls=Verb)


@verb("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where to look for runs")] = Path("artifacts"),
    json: Annotated[bool, typer.Option("--json", help="one JSON document instead of a table")] = False,
) -> None:
    """List the runs here: state, step, loss, speed, size.

    Example: tamis list
    """
    from tamis.run.locate import require_folder
    from tamis.run.monitor.listing import list_lines, list_records

    require_folder(folder)
    print(dumps(list_records(folder)) if json else "\n".join(list_lines(folder)))


@verb()
def status(run: NewestRun = None) -> None:
    """Print the state of a run in a few lines; exit code 1 when something is wrong.

    Example: tamis status artifacts/m7c_125m
    """
    from tamis.run.locate import last_written_run
    from tamis.run.monitor.listing import print_status

    raise typer.Exit(print_status(run or last_written_run()))


@verb()
def logs(
    run: NewestRun = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="how many lines from the end")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on printing until the run ends or Ctrl-C")] = False,
    after: Annotated[int | None, typer.Option(min=0, hidden=True, help="start at this byte")] = None,
    positions: Annotated[bool, typer.Option("--positions", hidden=True, help="print where each block ends")] = False,
) -> None:
    """Print the end of a run's train.log, with escapes made harmless.

    Example: tamis logs artifacts/m7c_125m --follow
    """
    from tamis.run.locate import last_written_run
    from tamis.run.monitor.listing import print_log

    print_log(run or last_written_run(), lines, follow, after=after, positions=positions)


@verb()
def monitor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="a run's directory, by default the newest; with --web also a folder of runs"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print the state once as text")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the state once as JSON")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between refreshes")] = 2.0,
    web: Annotated[bool, typer.Option("--web", help="serve it as a page for browsers on this machine")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page; 0: any free one")] = 8765,
    host: Annotated[str, typer.Option(help="address to listen on; beyond loopback the URL gets a token")] = "127.0.0.1",
) -> None:
    """Watch a run live: curves, ranks, GPUs, gates, ETA, alerts. Only reads.

    Examples:

      tamis monitor artifacts/m7c_125m

      tamis monitor artifacts/m7c_125m --once     (exit code 1 when something is wrong)

      tamis monitor --web                         (all runs in artifacts/, at http://127.0.0.1:8765)
    """
    from tamis.run.locate import RUNS, last_written_run

    if web:
        from tamis.run.monitor.web.server import serve_page

        raise typer.Exit(serve_page(run or RUNS, host, port))
    from tamis.run.monitor.command import show_run

    raise typer.Exit(show_run(run or last_written_run(), once=once, as_json=json, every_s=every))


@verb(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
def remote(
    words: Annotated[list[str] | None, typer.Argument(metavar="HOST VERB ...", help="tamis remote --help")] = None,
) -> None:
    """Train on another machine from here, over your own ssh: set up, start, watch, halt, fetch.

    Examples:

      tamis remote gpu1 setup

      tamis remote gpu1 run configs/m7c_125m_80g.yaml

      tamis remote gpu1,gpu2 status
    """
    from tamis.remote.command import main

    raise typer.Exit(main(words or []))


@verb()
def judge(run: RunDir) -> None:
    """Judge a run by the runbooks' success criteria, with the evidence for each; exit code 1 if one failed.

    Example: tamis judge artifacts/m7c_125m_2xa100_prod
    """
    from tamis.run.checks.runbooks import judge_run

    raise typer.Exit(judge_run(run))


@verb()
def report(
    run: RunDir,
    against: Annotated[Path | None, typer.Option(metavar="RUN2", help="a second run to compare with")] = None,
) -> None:
    """Write RUN/report.html: curves, criteria and facts on one page that needs no network.

    Examples:

      tamis report artifacts/train_showcase

      tamis report artifacts/m7c_nsa --against artifacts/m7c_dense
    """
    from tamis.run.handover.report import write_report
    from tamis.run.locate import existing_run

    directory = existing_run(run)
    with announced(f"reading and judging {directory.path}"):
        page = write_report(directory, None if against is None else existing_run(against))
    print_line(f"report: {page}")


@verb()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="run directories; the first is the reference")],
    page: Annotated[Path | None, typer.Option(help="also write the curves and the text as a page, here")] = None,
    any_data: Annotated[bool, typer.Option("--any-data", help="also runs of different data or tokenizers")] = False,
) -> None:
    """Compare the losses of runs at equal tokens, equal training time and equal loss. Only reads.

    Examples:

      tamis compare artifacts/m7c_dense artifacts/m7c_nsa

      tamis compare artifacts/m7c_dense artifacts/m7c_nsa --page comparison.html
    """
    from tamis.run.handover.compare import compare_runs
    from tamis.run.locate import existing_run

    directories = [existing_run(run) for run in runs]
    with announced(f"reading {counted(len(runs), 'run')}"):
        comparison = compare_runs(directories, any_data, page)
    print_line(comparison)


@verb()
def handoff(
    run: RunDir,
    output: Annotated[Path | None, typer.Option(help="the tar to write; by default next to RUN")] = None,
) -> None:
    """Pack everything a successor needs into one verified bundle, without secrets.

    Example: tamis handoff artifacts/m7c_125m_2xa100_prod
    """
    from tamis.run.handover.bundle import write_bundle

    raise typer.Exit(write_bundle(run, output=output))


@notify_verb("test")
def test_notify(words: Words = None) -> None:
    """Send a test message to every address of notify.to and TAMIS_NOTIFY; exit code 1 if one did not accept it.

    A plain http(s) address gets a POST with JSON. Other schemes (slack://, discord://, tgram://, ntfy://, mailto://, …)
    need apprise: pip install 'tamis[notify]'.

    Examples:

      TAMIS_NOTIFY=https://example.com/hook tamis notify test

      tamis notify test configs/m7c_125m_80g.yaml notify.to=ntfy://my-topic
    """
    from tamis.run.notify.notifier import send_test

    raise typer.Exit(send_test(resolve(words)))
