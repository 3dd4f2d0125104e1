"""Every byte under a directory, to compare before and after a start that must leave no trace."""

from pathlib import Path


def directory_bytes(path: Path) -> dict[str, bytes | str]:
    """Relative path → content of a file, or what else it is."""
    return {str(item.relative_to(path)): _content(item) for item in sorted(path.rglob("*"))}


def _content(path: Path) -> bytes | str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return path.read_bytes() if path.is_file() else "folder"
