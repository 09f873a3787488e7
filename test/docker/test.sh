#!/bin/bash
# Builds the image, runs it, sends a message through it, and runs it again on the same volume: with docker if an engine
# answers, otherwise with buildah and podman. BASE names another base image. As root without a registry, the script makes a
# stand-in for the official image from Debian packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
base=${BASE:-docker.io/library/postgres:18-bookworm}
image=localhost/pgqueue:test
container=pgqueue-test-$$

# Name everything that is missing at once.
need() {
    local why=$1 tool missing=''
    for tool in "${@:2}"; do
        command -v "$tool" >/dev/null || missing+=" $tool"
    done
    if [ -n "$missing" ]; then echo "needed $why, and missing:$missing (Debian: apt-get install$missing)" >&2; exit 1; fi
}

if docker info >/dev/null 2>&1; then
    engine=docker build=(docker build) run=(docker run)
else
    need 'where no docker engine answers' buildah podman crun
    engine=podman build=(buildah bud --format docker) run=(podman run)
    # Without systemd podman logs for every container that it cannot schedule the HEALTHCHECK, which is run below.
    podman() { command podman --log-level=fatal "$@"; }
    if [ "$(id -u)" -eq 0 ]; then
        # podman needs a mount table of its own that shows one version of cgroups.
        if [ -z "${OWN_MOUNTS:-}" ]; then exec env OWN_MOUNTS=1 unshare --mount "$0"; fi
        if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
        store=$root/.cache/images
        mkdir -p "$store"
        export CONTAINERS_STORAGE_CONF=$store/storage.conf
        printf '[storage]\ndriver = "overlay"\nrunroot = "%s/run"\ngraphroot = "%s/graph"\n' "$store" "$store" \
            > "$CONTAINERS_STORAGE_CONF"
        build+=(--isolation chroot --network host)
        # Without CAP_SYS_RESOURCE limits can be lowered but not raised.
        run+=(--network host --ulimit nofile=1024:1024 --ulimit nproc=4096:4096)
    fi
fi

have() { "$engine" image inspect "$1" >/dev/null 2>&1; }

# Only as root: debootstrap makes the file system of the first image.
make_standin() {
    if ! have localhost/debian:bookworm; then
        need 'where no image can be pulled' debootstrap
        files=$(mktemp -d)
        mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
        debootstrap --variant=minbase bookworm "$files" "$mirror" >/dev/null
        tar -C "$files" -c . | podman import - localhost/debian:bookworm >/dev/null
        rm -rf "$files"
    fi
    "${build[@]}" --build-arg ROOT=localhost/debian:bookworm -t "$1" -f "$here/standin.Dockerfile" "$here"
}

if ! have "$base" && ! "$engine" pull "$base" >/dev/null 2>&1; then
    if [ -n "${BASE:-}" ] || [ $engine = docker ] || [ "$(id -u)" -ne 0 ]; then
        echo "the base image $base cannot be pulled: name another one with BASE=" >&2
        exit 1
    fi
    echo "$base cannot be pulled; a stand-in is made from Debian packages"
    base=localhost/postgres:15-standin-$(cat "$here"/standin* | cksum | cut -d ' ' -f 1)
    have "$base" || make_standin "$base"
fi
"${build[@]}" --build-arg "BASE=$base" -t "$image" -f "$here/Dockerfile" "$root"

end() {
    "$engine" stop -t 30 "$container" >/dev/null
    "$engine" rm --volumes "$container" >/dev/null
}
trap '"$engine" rm --force --volumes "$container" >/dev/null; "$engine" volume rm "$container" >/dev/null' EXIT

# The volume and PGDATA are those of compose.yaml; a port of its own, since the network may be the host's.
start() {
    "${run[@]}" --detach --name "$container" --volume "$container:/var/lib/postgresql" \
        --env PGDATA=/var/lib/postgresql/pgdata --env POSTGRES_PASSWORD=secret --env PGPASSWORD=secret \
        --env PGPORT=54329 "$image" postgres -c listen_addresses=127.0.0.1 >/dev/null
    local deadline=$((SECONDS + 60))
    until healthy; do
        if [ $SECONDS -gt $deadline ]; then
            echo 'the container does not become healthy:' >&2
            "$engine" logs "$container" >&2
            exit 1
        fi
        sleep 0.2
    done
}

# The HEALTHCHECK of the image. docker runs it by itself; podman does so only with systemd.
healthy() {
    case $engine in
        docker) [ "$(docker inspect --format '{{.State.Health.Status}}' "$container")" = healthy ] ;;
        podman) podman healthcheck run "$container" >/dev/null 2>&1 ;;
    esac
}

ask() { "$engine" exec "$container" psql --host 127.0.0.1 --username postgres --no-psqlrc -Atq -v ON_ERROR_STOP=1 -c "$1"; }

start
ask "select pgqueue.create_queue('mail')" >/dev/null
ask "select pgqueue.enqueue('mail', '{\"to\": \"you\"}')" >/dev/null
answer=$(ask "select payload ->> 'to' from pgqueue.claim('mail')")
version=$(ask "select pgqueue.version() || ' on PostgreSQL ' || current_setting('server_version')")
if [ "$answer" != you ]; then echo "the message did not come back: $answer" >&2; exit 1; fi
end
start
left=$(ask "select queue_name || ': ' || inflight_messages from pgqueue.stats()")
if [ "$left" != 'mail: 1' ]; then echo "the next container found on the volume: $left" >&2; exit 1; fi
echo "a message went through pgqueue $version, in a container of $base"
