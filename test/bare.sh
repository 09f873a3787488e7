#!/bin/bash
# Runs `make demo`, `make test` and `make test-long` (with PART=soak one part of it) on a minimal Debian 12, in a clone of
# the last commit, with an empty HOME:
#     test/bare.sh root|user [FILE…]
#     test/bare.sh release
# With names of test files it runs `make demo` and these files. `release` has the files of .cache/release in place of the
# clone: it installs the Python package by name, the extension into Debian's PostgreSQL, and runs the first SQL of the
# README and the tutorial. A chroot has no user namespaces. The capabilities are those of a container by default. The
# script needs root and debootstrap, and passes on this machine's settings of apt, pip and npm.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
cache=$repository/.cache/bare
account=${1:-}
case $account in
    root | release) home=/root ids=0:0 ;;
    user) home=/home/user ids=1000:1000 ;;
    *) sed -n '2,10s/^# //p' "$0" >&2; exit 2 ;;
esac

# The namespaces end with the script, and with them its mounts and processes.
if [ -z "${OWN_MOUNTS:-}" ]; then
    exec env OWN_MOUNTS=1 unshare --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi

if [ ! -d "$cache/base" ]; then
    mkdir -p "$cache"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
    rm -rf "$cache/partial"
    debootstrap --variant=minbase --include=python3,make,ca-certificates,git bookworm "$cache/partial" "$mirror" >/dev/null
    mv "$cache/partial" "$cache/base"
fi
root=$(mktemp -d "$cache/root.XXXXXX")
trap 'umount --recursive --lazy "$root"; rm -rf --one-file-system "$root"' EXIT
cp -a "$cache/base/." "$root"
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -sf pts/ptmx "$root/dev/ptmx"

# Show directories of the machine, read-only. Directories that do not exist are left out.
show() {
    local directory
    for directory in "$@"; do
        if [ -d "$directory" ]; then
            mkdir -p "$root$directory"
            mount --bind -o ro "$directory" "$root$directory"
        fi
    done
}

# What the machine uses to reach its registries.
cp -L /etc/resolv.conf /etc/hosts "$root/etc"
for directory in /etc/apt /etc/ssl/certs; do  # packages of Debian add files there
    mkdir -p "$root$directory"
    cp -rL --remove-destination "$directory/." "$root$directory"
done
show /usr/share/keyrings /usr/share/ca-certificates /usr/local/share/ca-certificates
if [ "$account" = release ]; then
    chroot "$root" sh -c 'apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
        --no-install-recommends python3-venv postgresql-15' > "$cache/apt.log" 2>&1 || { cat "$cache/apt.log"; exit 1; }
fi
mapfile -t settings < <(
    env | grep -iE '^(PIP_|SSL_CERT_|NODE_EXTRA_CA_CERTS=|NPM_CONFIG_|[a-z]+_PROXY=)'
    python3 -m pip config list 2>/dev/null | python3 -c '
import ast, sys
for line in sys.stdin:
    name, value = line.rstrip("\n").split("=", 1)
    if not name.startswith(":env:"):
        option = name.rpartition(".")[2].upper().replace("-", "_")
        print("PIP_" + option, " ".join(ast.literal_eval(value).split()), sep="=")'
)
for path in "${settings[@]#*=}"; do
    for each in $path; do
        each=${each#file://}
        # The pages of an index link to files beside it.
        case $each in /etc/ssl/certs) ;; /*) show "${each%/simple}" ;; esac
        if [ -f "$each" ] && [ ! -e "$root$each" ]; then install -D -m 644 "$each" "$root$each"; fi
    done
done

if [ "$account" = user ]; then chroot "$root" useradd --create-home user; fi
if [ "$account" = release ]; then
    cp -r "$repository/.cache/release" "$root/release"
    python3 -m zipfile -e "$root"/release/pgqueue-*.zip "$root$home"
    mv "$root$home"/pgqueue-* "$root$home/pgqueue"
else
    git clone --quiet --no-hardlinks "$repository" "$root$home/pgqueue"
fi
chroot "$root" chown -R "$ids" "$home"

capabilities=-all
for name in chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod \
    audit_write setfcap; do
    capabilities+=,+$name
done
TIMEFORMAT='%R s, of processors %U s and %S s'
inside() {
    echo "$account: $*"
    time setpriv --no-new-privs --inh-caps=-all --bounding-set="$capabilities" \
        chroot --userspec="$ids" "$root" \
        env -i HOME="$home" PATH=/usr/local/bin:/usr/bin:/bin "${settings[@]}" \
        sh -c 'cd "$HOME/pgqueue" && exec "$@"' sh "$@"
}
# The code of a language in a document.
code() {
    python3 -c 'import re, sys; print("\n".join(re.findall(r"(?ms)^```%s\n(.*?)^```$" % sys.argv[1], open(sys.argv[2]).read())))' \
        "$1" "$root$home/pgqueue/$2"
}
if [ "$account" = release ]; then
    code sh extension/doc/tutorial.md > "$root/release/tutorial.sh"
    code sql README.md > "$root/release/first.sql"
    chmod -R a+rX "$root/release"
    inside make --silent install PG_CONFIG=/usr/lib/postgresql/15/bin/pg_config
    chroot "$root" sh -ec 'pg_ctlcluster 15 main start; cd /tmp
        runuser -u postgres -- psql -XqAt -v ON_ERROR_STOP=1 -f /release/first.sql; pg_ctlcluster 15 main stop'
    inside bash -ec 'export PIP_FIND_LINKS="/release ${PIP_FIND_LINKS-}"
        mkdir ~/tutorial; cd ~/tutorial; . /release/tutorial.sh; pgqueue stop'
    echo "$SECONDS s in all"
    exit
fi
inside make demo | while IFS= read -r line; do echo "$SECONDS s: $line"; done
du -sh "$root$home/pgqueue/.venv"
if [ $# -eq 1 ]; then
    inside make test
    inside make test-long ${PART:+"PART=$PART"}
else
    inside make test-tools
    inside make py FILE="${*:2}"
fi
