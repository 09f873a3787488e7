"""`make release`, in a throw-away clone."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Checkout:
    """A clone with the tools of this one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        subprocess.run(["git", "clone", "--quiet", ROOT, path], check=True)
        (path / ".venv").mkdir()
        for name in ("bin", "lib", "pyvenv.cfg"):
            (path / ".venv" / name).symlink_to(ROOT / ".venv" / name)
        (path / ".venv/ready").touch()
        for name, value in (("name", "Ann"), ("email", "ann@example.com")):
            self.git("config", f"user.{name}", value)

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def release(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"PYTHONPATH": str(self.path / "python/src")}
        command = [sys.executable, "test/release.py", *words]
        return subprocess.run(command, cwd=self.path, capture_output=True, text=True, check=False, env=environment)

    def commit(self, file: str, before: str, after: str) -> None:
        text = (self.path / file).read_text(encoding="utf-8")
        assert before in text
        (self.path / file).write_text(text.replace(before, after, 1), encoding="utf-8")
        self.git("commit", "--quiet", "--all", "--message", "A change")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "clone")


def test_a_release_is_refused_before_anything_changes(checkout: Checkout) -> None:
    head = checkout.git("rev-parse", "HEAD")
    for version, reason in (("1.0", "not a version of three numbers"), ("0.0.9", "is before")):
        assert reason in checkout.release(version).stderr
    (checkout.path / "notes").touch()
    assert "has changes that are not committed:\n?? notes" in checkout.release("9.0.0").stderr
    (checkout.path / "notes").unlink()
    checkout.git("tag", "v9.0.0")
    assert "the tag v9.0.0 exists" in checkout.release("9.0.0").stderr
    assert checkout.git("rev-parse", "HEAD") == head
    assert checkout.git("status", "--porcelain") == ""


@pytest.mark.parametrize("urls", [{}, {"Homepage": "https://git.example.org/ann/pgqueue"}], ids=["no-home", "home"])
def test_the_page_of_pypi_has_no_relative_link(urls: dict[str, str]) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "python/hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(hatch_build := importlib.util.module_from_spec(spec))
    metadata: dict[str, Any] = {"version": "9.0.0", "urls": urls}
    hatch_build.Page(str(ROOT / "python"), {}).update(metadata)
    links = re.findall(r"\]\(([^)]*)\)", metadata["readme"]["text"])
    home = "https://git.example.org/ann/pgqueue/blob/v9.0.0"
    assert (f"{home}/sql/REFERENCE.md#errors" in links) is (f"{home}/README.md" in links) is bool(urls)
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.long(part="release")
def test_a_release_is_refused_if_verify_fails(checkout: Checkout) -> None:
    checkout.commit("META.json", '"version": "', '"version": "7')
    done = checkout.release("9.0.0")
    assert done.returncode == 1
    assert "verify failed:\nMETA.json has version 7" in done.stderr
    assert "v9.0.0" not in checkout.git("tag").split()


@pytest.mark.long(part="release")
def test_a_release_has_the_version_everywhere_and_its_scripts_never_change(checkout: Checkout) -> None:
    checkout.git("remote", "set-url", "origin", "git@git.example.org:ann/pgqueue.git")
    done = checkout.release("9.0.0")
    assert done.returncode == 0, done.stderr
    assert checkout.git("describe") == "v9.0.0"
    assert checkout.git("status", "--porcelain") == ""
    assert "\n## 9.0.0 (20" in (checkout.path / "CHANGELOG.md").read_text(encoding="utf-8")
    made = checkout.path / ".cache/release"
    sums = {name: digest for digest, name in map(str.split, (made / "SHA256SUMS").read_text().splitlines())}
    assert set(sums) == {"pgqueue-9.0.0.zip", "pgqueue_sql-9.0.0-py3-none-any.whl", "pgqueue_sql-9.0.0.tar.gz"}
    assert sums == {name: hashlib.sha256((made / name).read_bytes()).hexdigest() for name in sums}
    # What somebody has who has nothing but these files.
    with zipfile.ZipFile(made / "pgqueue-9.0.0.zip") as archive:
        archive.extractall(checkout.path.parent)
    there = checkout.path.parent / "root"
    unpacked = checkout.path.parent / "pgqueue-9.0.0"
    subprocess.run(["make", "-C", unpacked, "install", f"prefix={there}"], check=True, capture_output=True)
    assert (there / "share/postgresql/extension/pgqueue--9.0.0.sql").exists()
    site = checkout.path.parent / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, site, *made.glob("*.whl")], check=True, capture_output=True)
    code = "import pgqueue, pgqueue._files as f; print(pgqueue.__version__, len(f.install_script()) > 1000)"
    environment = os.environ | {"PYTHONPATH": str(site)}
    (metadata,) = site.glob("pgqueue_sql-9.0.0.dist-info/METADATA")
    assert "Project-URL: Homepage, https://git.example.org/ann/pgqueue\n" in metadata.read_text(encoding="utf-8")
    assert "](https://git.example.org/ann/pgqueue/blob/v9.0.0/README.md)" in metadata.read_text(encoding="utf-8")
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert said.stdout == "9.0.0 True\n"

    # A change of a released script is refused, and the next version leaves it as it is.
    assert "the tag v9.0.0 exists" in checkout.release("9.0.0").stderr
    script = (checkout.path / "extension/pgqueue--9.0.0.sql").read_bytes()
    begun = checkout.release("--begin", "9.1.0-dev")
    assert begun.returncode == 0, begun.stderr
    checkout.git("add", "--all")
    checkout.git("commit", "--quiet", "--message", "Begin 9.1.0")
    assert (checkout.path / "extension/pgqueue--9.0.0.sql").read_bytes() == script
    assert (checkout.path / "extension/pgqueue--9.0.0--9.1.0-dev.sql").exists()
    done = checkout.release("9.1.0")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (checkout.path / "extension").glob("pgqueue--9.*.sql")) == [
        "pgqueue--9.0.0--9.1.0.sql",
        "pgqueue--9.0.0.sql",
        "pgqueue--9.1.0.sql",
    ]
    checkout.commit("extension/pgqueue--9.0.0.sql", "\n", "\n\n")
    assert "pgqueue--9.0.0.sql: FAILED" in checkout.release("9.2.0").stderr
