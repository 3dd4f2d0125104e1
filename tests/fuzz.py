"""All seeded fuzz cases: `python -m tests.fuzz [config|data|artefacts]`. The test suite runs a part of them."""

import os
import subprocess
import sys

FAMILIES = {  # name: test file, cases
    "config": ("tests/config/test_odd_configs.py", 500),
    "data": ("tests/data/test_odd_data.py", 100),
    "artefacts": ("tests/run/test_odd_files.py", 200),
}


def main(names: list[str]) -> int:
    failed = 0
    for name in names or FAMILIES:
        path, cases = FAMILIES[name]
        print(f"{name}: {cases} cases", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=3600", path]
        failed += subprocess.run(command, env={**os.environ, "TAMIS_FUZZ_CASES": str(cases)}).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
