"""Every store keeps the same contract: whole small files, resumable uploads, checksums of what it holds."""

import hashlib
from pathlib import Path

import fsspec
import pytest

from tamis.config import ConfigError, load_config
from tamis.run.copies.folder_store import FolderStore
from tamis.run.copies.fsspec_store import FsspecStore
from tamis.run.copies.ssh_store import SshStore
from tamis.run.copies.store import StoreError, Transfer, TransferCancelled, open_store
from tests.loopback_ssh import LoopbackSsh
from tests.run.copies.object_store import ACCESS_KEY, ObjectStore

CONTENT = bytes(range(256)) * 8192  # 2 MiB
SUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(params=["folder", "ssh", "object"])
def store(request, tmp_path: Path):
    if request.param == "folder":
        yield open_store(f"file://{tmp_path}/there it is")
    elif request.param == "ssh":
        request.getfixturevalue("ssh_on_path")
        yield open_store(f"gpubox:{tmp_path}/there it's")
    else:
        yield FsspecStore("memory://bucket/run", part_bytes=len(CONTENT) // 3)
        fsspec.filesystem("memory").store.clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "large.pt").write_bytes(CONTENT)
    return tmp_path / "here" / "large.pt"


def test_files_come_back_as_they_were_sent(store, source: Path, tmp_path: Path) -> None:
    assert store.names() == [] and store.read("a/small.json") is None and store.checksums(["a/large.pt"]) == {}
    store.write("a/small.json", b"one")
    store.write("a/small.json", b"two")
    store.put("a", {"large.pt": source}, Transfer())
    assert store.read("a/small.json") == b"two" and store.checksums(["a/none", "a/large.pt"]) == {"a/large.pt": SUM}
    assert store.names() == ["a"] and "small.json" in store.names("a")
    (tmp_path / "back").mkdir()
    store.get("a", ["large.pt"], tmp_path / "back")
    assert (tmp_path / "back" / "large.pt").read_bytes() == CONTENT
    store.remove("a/large.pt")
    assert store.checksums(["a/large.pt"]) == {}
    store.remove("a")
    store.remove("a")
    assert store.names() == []


class CutAfter(Transfer):
    """Ends an upload after some bytes, and counts those that were sent."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.sent = most, 0

    def spend(self, count: int) -> None:
        if self.sent + count > self.most:
            raise TransferCancelled
        self.sent += count


@pytest.mark.parametrize("kind", ["folder", "object"])
def test_an_upload_that_was_cut_is_continued(kind: str, source: Path, tmp_path: Path) -> None:
    third = len(CONTENT) // 3 + 1
    url = f"memory://bucket/{tmp_path.name}"
    store = FolderStore(tmp_path / "there") if kind == "folder" else FsspecStore(url, part_bytes=third)
    first, second = CutAfter(len(CONTENT) - 1), CutAfter(len(CONTENT))
    with pytest.raises(TransferCancelled):
        store.put("a", {"large.pt": source}, first)
    store.put("a", {"large.pt": source}, second)
    assert (
        store.checksums(["a/large.pt"]) == {"a/large.pt": SUM}
        and second.sent <= len(CONTENT) - third + 1 + first.sent % third
    )


def test_a_cut_connection_keeps_what_arrived(ssh_on_path: LoopbackSsh, source: Path, tmp_path: Path) -> None:
    store = open_store(f"gpubox:{tmp_path}/there")

    class CutWire(Transfer):
        """Cuts the connection once bytes have arrived on the other machine."""

        def check(self) -> None:
            if any(file.stat().st_size for file in (tmp_path / "there" / "a").iterdir()):
                ssh_on_path.cut()

    with pytest.raises(StoreError):
        store.put("a", {"large.pt": source}, CutWire(max_mbps=2))
    store.put("a", {"large.pt": source}, Transfer())
    assert store.checksums(["a/large.pt"]) == {"a/large.pt": SUM}
    assert [file.name for file in (tmp_path / "there" / "a").iterdir()] == ["large.pt"]


def test_a_full_store_and_a_wrong_key_are_named_with_their_remedy(
    ssh_on_path: LoopbackSsh, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "large.pt.part").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"No space left.*free space there, or lower copy\.keep"):
        FolderStore(tmp_path).put("full", {"large.pt": source}, Transfer())
    keys = ssh_on_path.folder / "authorized_keys"
    allowed = keys.read_text()
    keys.write_text("")
    try:
        with pytest.raises(StoreError, match=r"Permission denied.*give this machine's SSH key"):
            SshStore("stranger@gpubox", str(tmp_path)).names()
    finally:
        keys.write_text(allowed)
    with pytest.raises(StoreError, match="Connection refused"):
        open_store(f"gonebox:{tmp_path}").read("owner.json")


def test_a_real_client_of_object_stores(source: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("s3fs")
    server = ObjectStore()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = FsspecStore("s3://bucket/run", part_bytes=len(CONTENT) // 2)
    assert store.names() == [] and store.read("owner.json") is None
    server.cuts = 1  # the client tries again by itself
    store.put("step5", {"large.pt": source}, Transfer())
    store.write("step5/copy.json", b"{}")
    assert store.names("step5") == ["copy.json", "large.pt.parts"] and not server.cuts
    assert store.checksums(["step5/large.pt", "none"]) == {"step5/large.pt": SUM}
    store.get("step5", ["large.pt"], tmp_path)
    assert (tmp_path / "large.pt").read_bytes() == CONTENT
    server.is_full = True
    with pytest.raises(StoreError, match=r"the store is full: free space there, or lower copy\.keep"):
        store.write("step10/copy.json", b"{}")
    store.remove("step5")
    assert server.objects == {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(StoreError, match="set the credentials of the store's own tool"):
        FsspecStore("s3://bucket/run").read("owner.json")
    server.shutdown()


def test_an_upload_stays_within_its_speed() -> None:
    slept: list[float] = []
    transfer = Transfer(max_mbps=8, is_cancelled=lambda: slept.append(1.0) or False)
    transfer.spend(100_000)  # a tenth of a second at 1 MB a second
    transfer.spend(300_000)
    assert len(slept) >= 4  # looked again between the waits


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("me@nas:runs/m7c", SshStore("me@nas", "runs/m7c")),
        ("nas:/data/m7c/", SshStore("nas", "/data/m7c")),
        ("ssh://me@nas:2222/data/my%20run", SshStore("me@nas", "/data/my run", 2222)),
        ("ssh://nas/~/runs", SshStore("nas", "runs")),
    ],
)
def test_addresses_of_other_machines(url: str, expected: SshStore) -> None:
    assert load_config(None, [f"copy.to={url}"]).copy.to == url
    assert open_store(url) == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://me:secret@bucket/run", "must not hold a password"),
        ("/mnt/disk", "file:///path"),
        ("nas", "user@host:path"),
        ("-oProxyCommand=x:y", "user@host:path"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        load_config(None, [f"copy.to={url}"])
    assert url not in str(error.value)


def test_a_store_without_its_package_names_it() -> None:
    with pytest.raises(ConfigError, match="nosuchscheme"):
        open_store("nosuchscheme://x/y")
    with pytest.raises(ConfigError, match="no address for copies"):
        open_store("ssh://-oProxyCommand=x/y")
