"""The five documents that Tamis was built from: each command is in a runbook or among the listed differences."""

from __future__ import annotations

import re
from pathlib import Path

from tests.checkout import ROOT
from tests.test_runbooks import RUNBOOKS, commands

DOCUMENTS = sorted((ROOT / "tests" / "documents").glob("*.md"))
DIFFERENCES = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "runbooks" / "README.md").read_text(), flags=re.M | re.S)
PROGRAMS = (
    *("bash", "python", "torchrun", "touch", "kill", "pkill", "tail", "tensorboard", "watch", "nvidia-smi"),
    *("ssh", "tmux", "git", "cd", "export", "echo", "."),
)
PLACEHOLDERS = [
    (r"~/\.ssh/\w+", "~/.ssh/<key>"),
    (r"\w+@<(PROVIDED_ADDRESS|host)>|<user>@<prime-host>", "<user>@<host>"),
    (r"CONFIG=<same YAML>", "CONFIG=configs/m7c_125m_80g.yaml"),
]


def written_commands(document: Path) -> list[str]:
    """Lines of bash blocks, and code spans that begin with a program's name; a host or key has one placeholder."""
    text = document.read_text().replace("\\\n", " ")
    for pattern, placeholder in PLACEHOLDERS:
        text = re.sub(pattern, placeholder, text)
    lines = "".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)).splitlines()
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines += [span for span in spans if " " in span]  # a single word is a program's name
    lines = [re.sub(r"\s+", " ", re.sub(r"(^|\s)#.*", "", line)).strip() for line in lines]
    return [line for line in lines if starts_a_program(line)]


def starts_a_program(line: str) -> bool:
    words = [word for word in line.split() if not re.match(r"\w+=", word)]
    return line.startswith("pid=") or (bool(words) and words[0] in PROGRAMS)


def test_every_command_of_the_documents_is_in_a_runbook_or_among_the_differences() -> None:
    ours = {line for runbook in RUNBOOKS for line in commands(runbook)}
    listed = re.findall(r"`([^`]+)`", DIFFERENCES)
    count = 0
    for document in DOCUMENTS:
        for line in written_commands(document):
            count += 1
            remote = re.match(r'ssh .*"(?:cd nsa-vibe && )?(.*)"', line)
            asked = remote[1] if remote else line
            is_plain = line == "ssh -i ~/.ssh/<key> <user>@<host>"
            assert is_plain or asked in ours or asked in listed or line in ours, f"{document.name}: {line}"
    assert (len(DOCUMENTS), count) == (5, 70), "a document was changed, or its commands are no longer found"


def test_every_difference_names_a_document_and_what_holds() -> None:
    rows = [row.strip("|").split("|") for row in DIFFERENCES.splitlines() if re.match(r"\| \d", row)]
    assert len(rows) >= 25
    for row in rows:
        document, said, here, _ = (cell.strip() for cell in row)
        assert re.fullmatch(r"[0-4](, [0-4])*", document) and said and here, row
