"""The peers' bench on a CPU: ours and dense attention are timed, a peer is compared, and a missing one is skipped."""

import json

from tamis.attention import NSASpec, nsa
from tamis.bench.peers import PEERS, Peer, measure_peers


def test_installed_peers_are_compared_and_missing_ones_skipped_with_a_reason(capsys) -> None:
    def biased(q, k, v, gates, spec):
        return nsa(q, k, v, gates, spec) * 1.01

    def raising(q, k, v, gates, spec):
        raise RuntimeError("group size must be 16")

    peers = [
        Peer("same", ("json",), "-", nsa_of_another_package, one_block_size=True),
        Peer("biased", ("json",), "-", biased),
        Peer("refuses", ("json",), "-", raising),
        Peer("missing", ("no_such_package",), "pip install no-such-package", biased),
    ]
    document = measure_peers("tiny", [48], tokens=100, repeats=1, device="cpu", peers=peers)
    assert json.loads(json.dumps(document)) == document
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["dense", "tamis", "tamis, one block size", "same", "biased", "refuses"]
    assert rows["same"]["differs"] < 1e-6 and 0.009 < rows["biased"]["differs"] < 0.011
    assert all(rows[name]["both_ms"] > 0 for name in ("dense", "tamis", "same"))
    assert rows["refuses"]["error"] == "group size must be 16" and "differs" not in rows["refuses"]
    assert "No module named 'no_such_package'" in document["skipped"]["missing"]
    assert {(row["batch"], row["tokens"]) for row in document["rows"]} == {(2, 96)}
    printed = capsys.readouterr().out
    assert "96 tokens at length 48, in place of 100" in printed
    assert "missing is skipped: importing no_such_package fails" in printed and "pip install no-such-package" in printed


def nsa_of_another_package(q, k, v, gates, spec: NSASpec):
    assert spec.l == spec.d == spec.l_sel
    return nsa(q, k, v, gates, spec)


def test_every_peer_names_its_packages_and_how_to_install_them() -> None:
    assert all(peer.modules and peer.install.startswith("pip install ") for peer in PEERS)
