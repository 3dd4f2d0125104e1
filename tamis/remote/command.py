"""`tamis remote HOST VERB`: the command line. It parses its own words, because a laptop may have no typer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tamis.remote import watch
from tamis.remote.checkout import set_up
from tamis.remote.connection import Host, Unreachable, newest_run
from tamis.remote.hosts import DEFAULT_FOLDER, folder_of, forget_host, hosts_file, known_hosts, parse_hosts
from tamis.remote.launch import halt_remotely, launch_remotely
from tamis.remote.pull import pull_run
from tamis.remote.sender import CHOICES
from tamis.run.files.console import printable, say

DESCRIPTION = """\
Train on another machine from here, over your own ssh: its config, keys, agent and jump hosts apply.
This side needs Python and ssh alone. When the connection is lost the run goes on, and the command reconnects."""
EXAMPLES = """\
examples:
  tamis remote gpu1 setup                       send this checkout, bootstrap, tamis check
  tamis remote gpu1 run configs/m7c_125m_80g.yaml train.steps=1000
  tamis remote gpu1 launch --phases             tamis launch, in the background there
  tamis remote gpu1 logs -f
  tamis remote gpu1 tunnel                      the live page at http://127.0.0.1:8765
  tamis remote gpu1 pull                        curves, report, bundle and newest checkpoint, verified
  tamis remote gpu1,gpu2 status                 one table; tamis remote list: of all hosts

HOST is what you would give to ssh. TAMIS_SSH names another ssh, with options: TAMIS_SSH="ssh -F my_config".
RUN is a run's directory there; without it, the newest run."""


def main(arguments: Sequence[str]) -> int:
    """Run one verb; an error is one message and exit code 2, a host that cannot be reached 1."""
    try:
        return _run_verb(_parsed(_list_of_hosts(arguments)))
    except KeyboardInterrupt:
        print("interrupted; what runs on the host goes on", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {printable(error)}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, Unreachable) else 2


def _list_of_hosts(arguments: Sequence[str]) -> list[str]:
    """`tamis remote list` is `status` of all hosts that are known here."""
    if list(arguments) != ["list"]:
        return list(arguments) or ["--help"]
    if not (hosts := known_hosts()):
        raise ValueError("no host was set up from here yet: tamis remote HOST setup")
    return [",".join(hosts), "status"]


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The words; those of `run` and `launch` belong to the command there and are not looked at here."""
    parser = _parser()
    parsed, others = parser.parse_known_args(arguments)
    if parsed.verb in STARTS:
        parsed.words = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)} (tamis remote HOST {parsed.verb} --help)")
    return parsed


def _run_verb(words: argparse.Namespace) -> int:
    hosts = [Host(name, folder_of(name)) for name in parse_hosts(words.hosts)]
    if words.verb == "status" and (len(hosts) > 1 or words.run is None):
        return watch.print_table(hosts)
    if len(hosts) > 1:
        raise ValueError(f"{words.verb} takes one host; only status takes several")
    return VERBS[words.verb](hosts[0], words)


def _set_up(host: Host, words: argparse.Namespace) -> int:
    return set_up(Host(host.name, words.folder or host.folder), words.words, words.quick)


def _forget(host: Host, words: argparse.Namespace) -> int:
    if not forget_host(host.name):
        raise ValueError(f"{host.name} is not in {hosts_file()}")
    say(f"{host.name} is forgotten here; {host.folder} on it, with its runs, is as it was")
    return 0


STARTS = ("run", "launch")
VERBS: dict[str, Callable[[Host, argparse.Namespace], int]] = {
    "setup": _set_up,
    "run": lambda host, words: launch_remotely(host, "run", words.words),
    "launch": lambda host, words: launch_remotely(host, "launch", words.words),
    "status": lambda host, words: watch.print_remote_status(host, words.run),
    "logs": lambda host, words: watch.follow_logs(host, words.run, words.lines, words.follow),
    "monitor": lambda host, words: watch.show_monitor(host, words.run),
    "tunnel": lambda host, words: watch.open_tunnel(host, words.run, words.port, words.tensorboard),
    "halt": lambda host, words: halt_remotely(host, words.run, words.reason),
    "pull": lambda host, words: pull_run(host, newest_run(host, words.run), words.to, words.checkpoints),
    "forget": _forget,
}
HELP = {
    "setup": "send this checkout, install it there, and run `tamis check [CONFIG]`",
    "run": "run `tamis run` there in the background, with these words; a config file of this machine is sent",
    "launch": "run `tamis launch` there in the background, with these words; a config file of this machine is sent",
    "status": "list the runs of one or more hosts in a table, or print the state of RUN",
    "logs": "print the end of a run's log",
    "monitor": "show the live screen of a run in this terminal",
    "tunnel": "open the live page on a port of this machine, until Ctrl-C",
    "halt": "stop a run at its next step, with a checkpoint, and wait until it has",
    "pull": "fetch curves, logs, report, bundle and checkpoints; verified, and continued when interrupted",
    "forget": "drop the host from the list kept here; nothing changes on the host",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tamis remote",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tamis remote HOST[,HOST] VERB ...   or   tamis remote list",
    )
    parser.add_argument("hosts", metavar="HOST", help="as for ssh: a name of ~/.ssh/config, a host or user@host")
    group = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs = {
        name: group.add_parser(name, help=text, description=text, prog=f"tamis remote HOST {name}")
        for name, text in HELP.items()
    }
    for name in ("status", "logs", "monitor", "tunnel", "halt", "pull"):
        verbs[name].add_argument("run", nargs="?", metavar="RUN", help="a run's directory there; else the newest run")
    for name in STARTS:
        verbs[name].usage = f"tamis remote HOST {name} [what `tamis {name}` takes]"
    _add_options(verbs)
    return parser


def _add_options(verbs: Mapping[str, argparse.ArgumentParser]) -> None:
    setup, logs, tunnel, pull = (verbs[name] for name in ("setup", "logs", "tunnel", "pull"))
    setup.add_argument("words", nargs="*", metavar="CONFIG", help="what `tamis check` takes")
    setup.add_argument("--folder", help=f"where on the host; {DEFAULT_FOLDER} in the home directory by default")
    setup.add_argument("--quick", action="store_true", help="check only what needs no torch and no data")
    logs.add_argument("--lines", "-n", type=int, default=20, help="how many lines from the end")
    logs.add_argument("--follow", "-f", action="store_true", help="go on printing until the run ends or Ctrl-C")
    tunnel.add_argument("--port", type=int, default=8765, help="of the page on this machine (8765)")
    tunnel.add_argument("--tensorboard", type=int, metavar="PORT", help="TensorBoard too, as --tensorboard 6006")
    verbs["halt"].add_argument("--reason", default="requested by tamis remote halt", help="written to the log")
    pull.add_argument("--to", type=Path, metavar="FOLDER", help="where to put the files; pulled/RUN by default")
    pull.add_argument("--checkpoints", choices=CHOICES, default="newest", help="newest by default")
