"""Every `tamis` command of the README and the quickstart works in an empty folder after `pip install`, in their order.

The model is one that trains in a second. All commands run in one process, because each start of torch takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import MINIATURE, ROOT

QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", QUICKSTART, flags=re.M | re.S)
COMMANDS = [line.partition("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
TABLE = (ROOT / "README.md").read_text().split("| to | type |")[1].split("\n\n")[0]
SHOWCASE = "artifacts/train_showcase"
SMALL = [*MINIATURE, "train.seq_len=256", "train.steps=4", "train.eval_every=2", "train.save_every=2"]
# A launch would take minutes: its words are resolved instead, by the same code.
LAUNCH, RESOLVED = ("tamis run train.", "tamis run configs/"), ("tamis run", "tamis config show")
MAY_FAIL = "judge"  # four steps do not meet the runbooks' criteria
TYPE_ALL = """
import json, sys
import tamis
from tamis.__main__ import main
print(tamis.__file__)
all_words, may_fail = json.loads(sys.argv[1]), sys.argv[2]
for words in all_words:
    print("$ tamis", *words, flush=True)
    sys.argv = ["tamis", *words]
    try:
        main()
    except SystemExit as end:
        if end.code and words[0] != may_fail:
            sys.exit(f"exit code {end.code} of tamis {words}")
"""


def in_miniature(command: str) -> str:
    """The command with this test's names and the small model's keys."""
    command = command.replace("OUT", SHOWCASE).replace("FOLDER", "my_texts train.out_dir=artifacts/mine")
    if command.startswith(LAUNCH):
        return command.replace(*RESOLVED)
    if command.startswith("tamis data prepare"):
        return f"{command} data.tokenizer=byte data.val_fraction=0.05"
    return " ".join([command, *SMALL]) if command.startswith(("tamis run", "tamis estimate")) else command


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder of programs of a fresh environment: this project as a wheel, everything else borrowed from here."""
    source, venv = tmp_path / "source", tmp_path / "venv"
    shutil.copytree(ROOT / "tamis", source / "tamis", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip, offline = [sys.executable, "-m", "pip"], ["-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "--python", venv / "bin/python", "install", *offline, "--no-compile", wheel], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "borrowed.pth").write_text("\n".join(others) + "\n")
    return venv / "bin"


@pytest.mark.timeout(600)
def test_every_command_of_readme_and_quickstart_works_on_a_clean_install(installed: Path, tmp_path: Path) -> None:
    commands = [command for command in COMMANDS if command.startswith("tamis ")]
    assert set(COMMANDS) - set(commands) == {"bash scripts/prime_bootstrap.sh", ". .venv/bin/activate"}
    commands += re.findall(r"`(tamis [^`]+)`", TABLE)
    here = tmp_path / "empty"
    (here / "my_texts").mkdir(parents=True)
    for n in range(20):
        (here / "my_texts" / f"{n}.txt").write_text(f"A text of my own, number {n}. " * 40)
    words = [shlex.split(in_miniature(command))[1:] for command in commands]
    dropped = ("NSA_", "NCCL_", "TRITON_", "PYTEST_", "PYTHONPATH", "CONFIG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    settings = {"cwd": here, "env": {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, "text": True}
    version = subprocess.run([installed / "tamis", "--version"], capture_output=True, **settings)
    assert version.stdout.startswith("tamis "), version
    done = subprocess.run(
        [installed / "python", "-c", TYPE_ALL, json.dumps(words), MAY_FAIL],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **settings,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(str(installed.parent))
    assert (here / SHOWCASE / "report.html").is_file()
    assert (here / "artifacts" / "mine" / "checkpoint_step4.pt").is_file()
    assert (here / "shards" / "manifest.json").is_file()
