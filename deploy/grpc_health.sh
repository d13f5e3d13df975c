#!/usr/bin/env bash
# grpc.health.v1.Health/Check, for containers and tests: prints SERVING or NOT_SERVING, and what
# went wrong otherwise; exits 0 only for SERVING. Usage: grpc_health.sh [HOST:PORT [SERVICE]]
# The default address is ${GRPC_HEALTH_ADDRESS:-127.0.0.1:50051}. It speaks no TLS: a server whose
# --listen does needs a --health-listen, and this its address.
set -euo pipefail
address=${1:-${GRPC_HEALTH_ADDRESS:-127.0.0.1:50051}} service=${2:-}
[ ${#service} -lt 128 ] || { echo "the service's name is too long"; exit 2; }

request() {  # HealthCheckRequest {service} in gRPC's five-byte frame
  local size=$((${#service} ? ${#service} + 2 : 0))
  printf '\0\0\0\0'
  printf "\\x$(printf %02x "$size")"
  [ "$size" -eq 0 ] || printf "\\x0a\\x$(printf %02x "${#service}")%s" "$service"
}
answer=$(request | curl --silent --show-error --max-time 5 --http2-prior-knowledge \
  --header 'content-type: application/grpc' --header 'te: trailers' --data-binary @- \
  "http://$address/grpc.health.v1.Health/Check" | od -An -v -tx1 -N 64 | tr -d ' \n') || exit 1
case $answer in
  00000000020801) echo SERVING ;;
  00000000020802) echo NOT_SERVING; exit 1 ;;
  "") echo "no such service: '$service'"; exit 1 ;;
  *) echo "an answer that is none: $answer"; exit 1 ;;
esac
