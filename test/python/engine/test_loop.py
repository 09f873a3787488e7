"""`make tap`, `make spec` and `make py` find a file by its name, and keep a server between two calls."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import PATIENCE, wait_for

import pgqueue

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "test"))

from loop import find  # noqa: E402

TEST = f"""begin;
select plan(1);
select is(pgqueue.version(), '{pgqueue.__version__}', 'the extension is of this version');
select * from finish();
rollback;
"""


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("tap", "claim", "test/sql/claim.sql"),
        ("tap", "test/sql/claim.sql", "test/sql/claim.sql"),
        ("spec", "late_commit", "test/isolation/specs/late_commit.spec"),
        ("py", "test_client", "test/python/client/test_client.py"),
    ],
)
def test_a_file_is_found_by_its_name(kind: str, name: str, path: str) -> None:
    assert find(kind, [name]) == [ROOT / path]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("tap", "clam", r"make tap FILE=…: 'clam' is not in test/sql\. Possible names: claim"),
        ("tap", "../claim_", r"Possible names: .*claim"),
        ("spec", "latecommit", r"make spec NAME=…: 'latecommit' is not in .*specs\. Possible names: late_commit"),
        ("py", "client", r"make py FILE=…: 'client' is not in test\. Possible names: .*test_client"),
        ("tap", "xyzzy", r"Possible names: access, ack, .*, wake$"),
    ],
)
def test_a_wrong_name_is_refused_with_those_that_are_close(kind: str, name: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        find(kind, [name])


def test_a_call_without_a_name_is_refused_with_the_possible_names() -> None:
    with pytest.raises(SystemExit, match=r"make spec NAME=…: NAME is missing\. Possible names: ack_batches, "):
        find("spec", [])


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A copy of what `make tap` uses, with one pgTAP file; its server is stopped at the end."""
    for name in ("pgqueue.control", "extension", "test/harness.py", "test/loop.py", "test/python/clients.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for name in ("debs", "pgtap"):
        (tmp_path / ".cache").mkdir(exist_ok=True)
        (tmp_path / ".cache" / name).symlink_to(ROOT / ".cache" / name)
    (tmp_path / "test/sql").mkdir()
    (tmp_path / "test/sql/version.sql").write_text(TEST)
    yield tmp_path
    shutil.rmtree(tmp_path / ".cache/kept", ignore_errors=True)


@pytest.mark.long(part="engine")
@pytest.mark.skipif(not (ROOT / ".cache/debs/ready").exists(), reason="pg_prove is missing: make test-tools")
def test_a_server_is_kept_and_has_the_extension_as_it_is_now(checkout: Path) -> None:
    script, kept = checkout / "extension/pgqueue--0.1.0.sql", checkout / ".cache/kept/18"

    def tap() -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(checkout / "test/loop.py"), "tap", "version"]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    done = tap()
    assert (done.returncode, "ok, 1 files, 1 tests" in done.stdout) == (0, True), done.stdout + done.stderr
    keeper = kept.read_text()
    script.write_text(script.read_text().replace(f"select '{pgqueue.__version__}'::text", "select '0.0.1'::text"))
    done = tap()
    assert done.returncode == 1
    assert 'Failed test 1: "the extension is of this version"' in done.stdout
    script.write_text(script.read_text() + "selec 1;")
    done = tap()
    assert done.returncode == 1
    assert 'syntax error at or near "selec"' in done.stdout
    assert kept.read_text() == keeper

    directory = Path(keeper.partition("host=")[2].split()[0])
    assert directory.exists()
    shutil.rmtree(kept.parent)  # what `make stop` does
    wait_for(lambda: not directory.exists())
