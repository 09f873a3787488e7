"""Makes a release, `release.py 0.2.0`; builds its files again from its commit, `release.py`; or writes the version of
the next one, `release.py --begin 0.3.0-dev`.

A release is one commit with the version and the date, a tag, and the artefacts in .cache/release: the wheel and the
source distribution for PyPI, the archive for PGXN, and their checksums; images where a builder answers. Nothing leaves
the machine. If a step fails, the checkout is as before. Standard library, and tools of .venv.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from versions import SEMANTIC_VERSION

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / ".cache/release"
FROZEN = ROOT / "extension/frozen.sha256"
MAJORS = (15, 16, 17, 18)
# What make hands down to the programs that it starts: among it VERSION, which has another meaning for other targets.
MAKES = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "VERSION")
# What PGXN's users need: to build, to install, and to read.
ARCHIVED = "META.json Makefile pgqueue.control README.md LICENSE CHANGELOG.md SECURITY.md CONTRIBUTING.md extension sql"


class Refused(Exception):
    """Why no release is made."""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command, and return what it prints."""
    words = [str(word) for word in command]
    inherited = {name: text for name, text in os.environ.items() if name not in MAKES}
    done = subprocess.run(words, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


def make(target: str) -> None:
    """Run make. Another version in pyproject.toml does not need another .venv."""
    run("make", "--no-print-directory", "--old-file", ".venv/ready", target)


# The version.


def current() -> str:
    """The version that pgqueue.control has."""
    found = re.search(r"^default_version = '(.*)'$", (ROOT / "pgqueue.control").read_text(), re.MULTILINE)
    return found[1] if found else "0"


def edit(file: str, pattern: str, text: str) -> None:
    """Replace the one place of a file that matches the pattern."""
    path = ROOT / file
    changed, count = re.subn(pattern, text, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    if not count:
        raise Refused(f"{file} has nothing that matches {pattern}")
    path.write_text(changed, encoding="utf-8")


def home() -> str | None:
    """The page of the repository, by the remote `origin`; None if that is not public."""
    remote = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    found = re.fullmatch(r"(?:https://|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?\n", remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def write_home() -> None:
    """Write the page of the repository into the card of PGXN and the metadata of PyPI."""
    url = home()
    if url is None:
        print('no home page: the remote "origin" has no public URL')
        return
    card = json.loads((ROOT / "META.json").read_text())
    card["resources"] = {
        "homepage": url,
        "bugtracker": {"web": f"{url}/issues"},
        "repository": {"url": f"{url}.git", "web": url, "type": "git"},
    }
    (ROOT / "META.json").write_text(json.dumps(card, indent=4) + "\n")
    urls = f'[project.urls]\nHomepage = "{url}"\nIssues = "{url}/issues"\n\n'
    edit("python/pyproject.toml", r"^(\[project\.urls\]\n(.+\n)*\n)?(?=\[project\.scripts\])", urls)


def is_frozen(version: str) -> bool:
    """Whether the scripts of the version are those of a release."""
    return FROZEN.exists() and f"pgqueue--{version}.sql" in FROZEN.read_text()


def write_version(version: str) -> None:
    """Write the version wherever it stands, and generate the scripts for it."""
    old = current()
    places = {
        "pgqueue.control": r"^(default_version = ')",
        "python/pyproject.toml": r'^(version = ")',
        "python/src/pgqueue/__init__.py": r'^(__version__ = ")',
        "sql/doctor.sql": r"^(as \$\$ select ')",
        "CHANGELOG.md": r"^(## )",
    }
    for file, before in places.items():
        edit(file, before + re.escape(old), rf"\g<1>{version}")
    card = json.loads((ROOT / "META.json").read_text())
    card["version"] = card["provides"]["pgqueue"]["version"] = version
    card["provides"]["pgqueue"]["file"] = f"extension/pgqueue--{version}.sql"
    card["release_status"] = "unstable" if "-" in version else "testing" if version.startswith("0.") else "stable"
    (ROOT / "META.json").write_text(json.dumps(card, indent=4) + "\n")
    if old != version and not is_frozen(old):
        for script in [*ROOT.glob(f"extension/pgqueue--{old}.sql"), *ROOT.glob(f"extension/pgqueue--*--{old}.sql")]:
            script.unlink()
        for delta in ROOT.glob(f"sql/upgrade/*--{old}.sql"):
            delta.rename(delta.with_name(f"{delta.name.partition('--')[0]}--{version}.sql"))
    make("build")
    make("reference")


def begin(version: str) -> None:
    """Start the next version: its entry in CHANGELOG, and an upgrade from the last release without changes of state."""
    released = current()
    if not is_frozen(released):
        raise Refused(f"{released} is not released: make release VERSION={released}")
    upgrade = ROOT / f"sql/upgrade/{released}--{version}.sql"
    upgrade.parent.mkdir(exist_ok=True)
    upgrade.write_text(f"-- What `create or replace` cannot say of the way from {released} to {version}.\n")
    edit("CHANGELOG.md", "^## ", f"## {released}\n\n## ")
    write_version(version)


def write_release(version: str) -> None:
    """Write the version, the date, and the checksums of the scripts, which never change from here on."""
    write_home()
    write_version(version)
    edit("CHANGELOG.md", f"^## {re.escape(version)}$", f"## {version} ({datetime.now(UTC):%Y-%m-%d})")
    scripts = [ROOT / f"extension/pgqueue--{version}.sql", *sorted(ROOT.glob(f"extension/pgqueue--*--{version}.sql"))]
    with FROZEN.open("a") as file:
        file.writelines(f"{hashlib.sha256(script.read_bytes()).hexdigest()}  {script.name}\n" for script in scripts)


# What a release needs, and makes.


def check(version: str) -> None:
    """Refuse what could not be undone later."""
    if not SEMANTIC_VERSION.fullmatch(version) or "-" in version:
        raise Refused(f"VERSION={version} is not a version of three numbers, such as 0.2.0")
    if changed := run("git", "status", "--porcelain"):
        raise Refused(f"the checkout has changes that are not committed:\n{changed}")
    if run("git", "tag", "--list", f"v{version}"):
        raise Refused(f"the tag v{version} exists: a release is never made again, choose the next version")
    ours, wanted = (tuple(map(int, each.partition("-")[0].split("."))) for each in (current(), version))
    if wanted < ours:
        raise Refused(f"VERSION={version} is before {current()}, the version of the checkout")
    if is_frozen(version):
        raise Refused(f"{version} is released: make version VERSION={wanted[0]}.{wanted[1] + 1}.0-dev begins the next")
    make("verify")


def build_artefacts(version: str) -> None:
    """Make the artefacts from the commit, and check them."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    python = ROOT / ".venv/bin/python"
    epoch = run("git", "log", "-1", "--format=%ct")  # so that the same commit gives the same files
    build = (python, "-m", "hatchling", "build", "--target", "sdist", "--target", "wheel", "--directory", OUT)
    run(*build, cwd=ROOT / "python", SOURCE_DATE_EPOCH=epoch)
    name = f"pgqueue-{version}"
    run("git", "archive", f"--prefix={name}/", f"--output={OUT / name}.zip", "HEAD", *ARCHIVED.split())
    with zipfile.ZipFile(OUT / f"{name}.zip") as archive:
        provided = json.loads(archive.read(f"{name}/META.json"))["provides"]["pgqueue"]
        if missing := {f"{name}/{provided[key]}" for key in ("file", "docfile")} - set(archive.namelist()):
            raise Refused(f"{name}.zip lacks {', '.join(missing)}")
    run(python, "-m", "twine", "check", "--strict", *OUT.glob("*.whl"), *OUT.glob("*.tar.gz"))
    # The modules of Spark and pytest stand beside the package. A migration begins with a number: W004.
    options = ("--toplevel=pgqueue,pyspark_pgqueue.py,pytest_pgqueue.py", "--ignore=W004")
    run(ROOT / ".venv/bin/check-wheel-contents", *options, *OUT.glob("*.whl"))
    images(version)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(OUT.iterdir())]
    (OUT / "SHA256SUMS").write_text("".join(sums))


def images(version: str) -> None:
    """Build the images of PostgreSQL and of the service, if docker answers."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        print("no images: no docker engine answers")
        return
    for major in MAJORS:
        base, tag = f"BASE=postgres:{major}-bookworm", f"pgqueue:{version}-pg{major}"
        run("docker", "build", "--build-arg", base, "--tag", tag, "--file", "test/docker/Dockerfile", ".")
    run("docker", "build", "--tag", f"pgqueue-serve:{version}", "--file", "test/docker/serve.Dockerfile", OUT)


def release(version: str) -> None:
    """Make the commit, the artefacts and the tag, or nothing."""
    check(version)
    before = run("git", "rev-parse", "HEAD")
    try:
        write_release(version)
        make("verify")
        run("git", "add", "--all")
        run("git", "commit", "--message", f"Release {version}")
        build_artefacts(version)
        run("git", "tag", "--annotate", "--message", f"pgqueue {version}", f"v{version}")
    except BaseException:
        run("git", "reset", "--hard", before)
        run("git", "clean", "-fdq", "extension", "sql")
        raise
    print(f"tagged v{version}; {OUT.relative_to(ROOT)} has:", *sorted(each.name for each in OUT.iterdir()), sep="\n  ")
    print("Look at it, then: git push --follow-tags. .github/workflows/release.yml publishes what is tagged.")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("version", nargs="?")
    parser.add_argument("--begin", action="store_true")
    given = parser.parse_args()
    try:
        if given.version is None:
            build_artefacts(current())
        else:
            (begin if given.begin else release)(given.version)
    except Refused as refusal:
        print(f"no release: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
