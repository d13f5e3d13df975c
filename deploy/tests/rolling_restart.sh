#!/usr/bin/env bash
# Two servers behind nginx (deploy/nginx/grpc.conf, other ports), clients that never pause, and both
# servers restarted: first as the configuration says, then the second by a bare SIGTERM. Passes if
# every answer is the text that an undisturbed server gives: none failed, lost or duplicated. These
# clients repeat a request only if it was UNAVAILABLE before its first token; beside them a load of
# `treadle bench serve`, which repeats nothing, must lose nothing while nginx is told.
# Usage: rolling_restart.sh TREADLE MODEL
set -euo pipefail
treadle=$(realpath "${1:?usage: rolling_restart.sh TREADLE MODEL}") model=$(realpath "${2:?}")
cd "$(dirname "$0")/.."
clients=3 tokens=48
prompts=("Once upon a time" "The capital of France is" "Water boils at" "In the year 1969"
  "A good recipe for bread" "The shortest way home")
work=$(mktemp -d)
started=() running=()  # processes; clients
finish() {
  # Killed, nginx would leave its workers behind.
  [ -z "${nginx_pid:-}" ] || { kill -TERM "$nginx_pid" 2>/dev/null && wait "$nginx_pid" || true; }
  for pid in "${started[@]}" "${running[@]}"; do { kill -KILL "$pid" && wait "$pid"; } 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT

mapfile -t ports < <(python3 -c 'import socket
held = [socket.socket() for _ in range(3)]
for one in held:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')

start() {  # instance: starts it and waits until it is ready
  "$treadle" serve --model "$model" --listen "127.0.0.1:${ports[$1]}" --http-listen none --metrics-listen none --threads 1 \
    --pin-threads off --kv-memory 256M --drain-timeout 60s 2>"$work/server.$1" &
  servers[$1]=$!
  started+=($!)
  for _ in $(seq 600); do
    ./grpc_health.sh "127.0.0.1:${ports[$1]}" treadle.v1.Inference >/dev/null 2>&1 && return
    sleep 0.1
  done
  echo "server $1 did not become ready:" >&2
  cat "$work/server.$1" >&2
  exit 1
}

stop() {  # instance: SIGTERM, and its end with exit code 0
  kill -TERM "${servers[$1]}"
  wait "${servers[$1]}" && tail -n 1 "$work/server.$1" | grep -qx drained && return
  echo "server $1 did not drain:" >&2
  cat "$work/server.$1" >&2
  exit 1
}

configure() {  # [instance that is down]
  sed -e "s/127.0.0.1:50050/127.0.0.1:${ports[0]}/" -e "s/127.0.0.1:50051/127.0.0.1:${ports[1]}/" \
    -e "s/127.0.0.1:50052/127.0.0.1:${ports[2]}/" nginx/grpc.conf >"$work/grpc.conf"
  [ -z "${1:-}" ] || sed -i "s/server 127.0.0.1:${ports[$1]}/& down/" "$work/grpc.conf"
}

restart() {  # instance: as the configuration says
  configure "$1"
  "${nginx[@]}" -s reload
  sleep 1
  stop "$1"
  start "$1"
  configure
  "${nginx[@]}" -s reload
}

ask() {  # address, prompt: the text on stdout
  timeout 120 "$treadle" generate --target "$1" --temperature 0 --ignore-eos --max-new-tokens "$tokens" --prompt "$2"
}

client() {  # number: asks until told to stop; counts in files
  local turn=$1 out=$work/out.$1 err=$work/err.$1 done_count=0 repeated=0 code
  while [ ! -e "$work/stop" ]; do
    local which=$((turn++ % ${#prompts[@]})) tries=0
    while :; do
      code=0
      ask "127.0.0.1:${ports[0]}" "${prompts[$which]}" >"$out" 2>"$err" || code=$?
      [ "$code" -ne 0 ] && [ ! -s "$out" ] && grep -q UNAVAILABLE "$err" && [ $((++tries)) -lt 1000 ] || break
      repeated=$((repeated + 1))
      sleep 0.05
    done
    if [ "$code" -ne 0 ] || ! cmp -s "$out" "$work/expected.$which"; then
      { echo "client $1, '${prompts[$which]}', exit code $code:"; cat "$err" "$out"; echo; } >>"$work/failed"
    fi
    done_count=$((done_count + 1))
    echo "$done_count $repeated" >"$work/count.$1"
  done
}

sum() { cat "$work"/count.* | awk -v column="$1" '{n += $column} END {print n + 0}'; }

# Waits until every client has had so many more answers.
progress() {
  local goal=$(($(sum 1) + $1 * clients))
  for _ in $(seq 1200); do
    [ "$(sum 1)" -lt "$goal" ] || return 0
    sleep 0.1
  done
  echo "the clients do not get on:" >&2
  cat "$work"/err.* "$work/nginx.log" >&2
  exit 1
}

servers=()
start 1
start 2
for i in "${!prompts[@]}"; do ask "127.0.0.1:${ports[1]}" "${prompts[$i]}" >"$work/expected.$i"; done

configure
cat >"$work/nginx.conf" <<CONF
pid $work/nginx.pid;
error_log $work/nginx.log;
events {}
http {
  access_log off;
  client_body_temp_path $work/body;
  proxy_temp_path $work/proxy;
  fastcgi_temp_path $work/fastcgi;
  uwsgi_temp_path $work/uwsgi;
  scgi_temp_path $work/scgi;
  include $work/grpc.conf;
}
CONF
nginx=(nginx -c "$work/nginx.conf" -e "$work/nginx.log")
"${nginx[@]}" -t -q
"${nginx[@]}" -g 'daemon off;' &
nginx_pid=$!
for ((c = 0; c < clients; c++)); do
  echo "0 0" >"$work/count.$c"
  client "$c" &
  running[c]=$!
done

# As nginx is told; beside it load upon load, each over one connection.
load() {
  while [ ! -e "$work/told" ]; do
    timeout 300 "$treadle" bench serve --target "127.0.0.1:${ports[0]}" --num-prompts 24 --request-rate 4 \
      --input-len 8:64 --output-len 1:32 --json >>"$work/load.json" 2>"$work/load.log" || return 1
  done
}
load &
load_pid=$!
running+=("$load_pid")
progress 2
restart 1
progress 2
restart 2
progress 1
touch "$work/told"
wait "$load_pid" || { cat "$work/load.log" >&2; exit 1; }
told=$(sum 2)
load_result=$(python3 -c 'import json, sys
runs = [json.loads(line) for line in sys.stdin]
failed = sum(run["failed"] for run in runs)
assert failed == 0, f"{failed} requests of the load failed"
print("a load of", sum(run["completed"] for run in runs), "requests lost none")' <"$work/load.json")

stop 2                     # a bare SIGTERM
progress 2
start 2
progress 4

touch "$work/stop"
wait "${running[@]}"
stop 1
stop 2
# Nobody is there: a status that a gRPC client understands.
ask "127.0.0.1:${ports[0]}" "x" >"$work/out" 2>"$work/err" && exit 1
grep -q "UNAVAILABLE: no instance answers" "$work/err" || { cat "$work/err" >&2; exit 1; }

if [ -s "$work/failed" ]; then
  cat "$work/failed" >&2
  exit 1
fi
echo "rolling restart: $load_result; $(sum 1) other answers, all as expected; repeated before the first token:" \
  "$told with nginx told, $(($(sum 2) - told)) with a bare SIGTERM"
