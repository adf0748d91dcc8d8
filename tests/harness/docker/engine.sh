#!/usr/bin/env bash
# A Docker engine of its own for the container tests: Debian's docker.io, a private socket, a private data root.
#   engine.sh run COMMAND...   bring it up, run COMMAND with SPECACCEPT_DOCKER_HOST set, take it down again
#   engine.sh up               leave it running; prints the line to export
#   engine.sh down             stop it
# Needs root on Debian, kernel namespaces and cgroups. The base images are made once and kept in SPECACCEPT_DOCKER_CACHE.
# Exit status 77: no engine can be had here, and why.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
cache=${SPECACCEPT_DOCKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/specaccept-docker}
python=${PYTHON:-$root/.venv/bin/python}
socket=$cache/docker.sock
export SPECACCEPT_DOCKER_HOST=unix://$socket

cannot() { echo "engine.sh: no Docker engine here: $*" >&2; exit 77; }

install() {
  [[ $(id -u) == 0 ]] || cannot "needs root"
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  command -v docker-registry >/dev/null || missing+=(docker-registry)
  command -v iptables >/dev/null || missing+=(iptables)
  [[ -d /sys/fs/cgroup/memory || -f /sys/fs/cgroup/cgroup.controllers ]] || missing+=(cgroupfs-mount)
  if ((${#missing[@]})); then
    command -v apt-get >/dev/null || cannot "missing ${missing[*]}, and no apt-get"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$cache/apt.log" 2>&1 ||
      cannot "apt-get install ${missing[*]}: $(tail -1 "$cache/apt.log")"
  fi
  [[ -d /sys/fs/cgroup/memory || -f /sys/fs/cgroup/cgroup.controllers ]] || cgroupfs-mount
}

up() {
  mkdir -p "$cache"
  install
  if ! answers; then
    rm -f "$cache/dockerd.pid"
    # Sockets have short names: containerd's lies below exec-root.
    setsid dockerd --host "unix://$socket" --data-root "$cache/data" --exec-root "/run/specaccept-docker" \
      --pidfile "$cache/dockerd.pid" --log-level warn </dev/null >"$cache/dockerd.log" 2>&1 &
    local child=$!
    for _ in $(seq 150); do
      answers && break
      kill -0 "$child" 2>/dev/null || cannot "$(grep -v '^$' "$cache/dockerd.log" | tail -1)"
      sleep 0.2
    done
    answers || cannot "dockerd does not answer: $(tail -1 "$cache/dockerd.log")"
  fi
  "$python" "$root/tests/harness/docker/container_base.py" "$cache"
}

answers() {
  "$python" -c 'import sys, docker; docker.DockerClient(sys.argv[1], timeout=2).ping()' "unix://$socket" 2>/dev/null
}

down() {
  local pid
  pid=$(cat "$cache/dockerd.pid" 2>/dev/null) || return 0
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
  kill -9 "$pid" 2>/dev/null || true
}

case ${1:-} in
  run)
    shift
    trap down EXIT
    up
    "$@"
    ;;
  up) up && echo "export SPECACCEPT_DOCKER_HOST=$SPECACCEPT_DOCKER_HOST" ;;
  down) down ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
