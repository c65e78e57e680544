# What the scripts share; read with `source`, from the root of the repository.

# Everything that outlives a clone: built tools, virtual environments.
cache=${BOWLINE_CACHE:-$HOME/.cache/bowline}

say() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# Runs a command as root: by itself, or by sudo.
as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    fail "not root and no sudo: run as root: $*"
  fi
}

# The folder of the debug build.
target_dir() { printf '%s\n' "${CARGO_TARGET_DIR:-target}/debug"; }

# start_server LOG [FLAG …]: starts a server on free ports with a data directory of its own and waits until it is
# ready. Sets server_pid and server_ws (host:port of the public listener).
start_server() {
  local log=$1
  shift
  server_data=$(mktemp -d)
  "$(target_dir)/bowline" serve --data "$server_data" \
    --listen 127.0.0.1:0 --tcp 127.0.0.1:0 --api 127.0.0.1:0 "$@" >"$log" 2>&1 &
  server_pid=$!
  local tries
  for ((tries = 0; tries < 200; tries++)); do
    if grep -qx ready "$log"; then
      server_ws=$(grep -iwE 'ws|websocket|public' "$log" | grep -oE '127\.0\.0\.1:[0-9]+' | head -n 1)
      [[ -n $server_ws ]] && return 0
    fi
    kill -0 "$server_pid" 2>/dev/null || break
    sleep 0.1
  done
  cat "$log" >&2
  fail "the server did not become ready"
}

stop_server() {
  kill -KILL "$server_pid" 2>/dev/null
  wait "$server_pid" 2>/dev/null
  rm -rf "$server_data"
}
