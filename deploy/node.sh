# What every machine of a cluster sets before its Ray starts: sourced by the start commands of the `ray up` files.
#
#   . ~/baton/deploy/node.sh
#   ray start ...
#
# Values that are set already stay: a line such as `export UCX_TLS=...` in ~/.bashrc of a machine wins.

export PATH="${BATON_VENV:-$HOME/baton-venv}/bin:$PATH"

# What Ray writes here, its logs among it, is for this user alone, and so is its token.
umask 077
[ ! -f "$HOME/.ray/auth_token" ] || chmod 600 "$HOME/.ray/auth_token" || true

# Ray asks everyone for the token in ~/.ray/auth_token; it tells nobody outside that this cluster exists.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"

# Serve reads these when its processes start: throughput mode, room for prompts of a million tokens, no patience with
# replicas that hang, and a look at each HTTP proxy every second: one that died is replaced after three. One that starts
# has a minute. No proxy holds more than 256 MiB of request bodies (BATON_PROXY_MAX_READING_BYTES), and
# half-closed connections and HTTP/1.0 get their answers.
export RAY_SERVE_THROUGHPUT_OPTIMIZED="${RAY_SERVE_THROUGHPUT_OPTIMIZED:-1}"
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH="${RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH:-67108864}"
export RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS="${RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS:-1}"
export RAY_SERVE_CONTROL_LOOP_INTERVAL_S="${RAY_SERVE_CONTROL_LOOP_INTERVAL_S:-0.25}"
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH="${RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH:-cluster.deploy.http_middlewares:middlewares}"
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S="${RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S:-1}"
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="${RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S:-20}"
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
export RAY_SERVE_METRICS_EXPORT_INTERVAL_MS="${RAY_SERVE_METRICS_EXPORT_INTERVAL_MS:-2000}"
export RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="${RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S:-1}"

# Throughput mode alone would leave the head with the only HTTP proxy, and open a port for every router.
export RAY_SERVE_ENABLE_DIRECT_INGRESS="${RAY_SERVE_ENABLE_DIRECT_INGRESS:-0}"

# A head whose tables are in Redis can be restarted without a request noticing: set RAY_REDIS_ADDRESS=HOST:PORT, and
# BATON_REDIS_PASSWORD, in the head's ~/.bashrc.
export BATON_HEAD_OPTIONS="${RAY_REDIS_ADDRESS:+--redis-password=${BATON_REDIS_PASSWORD:-}}"

# The head's autoscaler compares ~/baton with what it sent, and restarts Ray on every machine where it finds something new.
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$HOME/.cache/baton/python}"
export NUMBA_CACHE_DIR="${NUMBA_CACHE_DIR:-$HOME/.cache/baton/numba}"

# How long machines wait for a head that is restarted; Ray's own patience is a minute.
export RAY_gcs_rpc_server_reconnect_timeout_s="${RAY_gcs_rpc_server_reconnect_timeout_s:-600}"

# Where Ray's helpers of a machine listen: known ports are ports that need not be waited for.
BATON_HELPER_PORTS="--dashboard-agent-listen-port=52365 --dashboard-agent-grpc-port=52366"
BATON_HELPER_PORTS="$BATON_HELPER_PORTS --runtime-env-agent-port=52367 --metrics-export-port=52368"
export BATON_NODE_OPTIONS="${BATON_NODE_OPTIONS:-$BATON_HELPER_PORTS}"

# RDMA registers memory, and every connection is a file.
ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)"
ulimit -n "$(ulimit -H -n)"

# baton_start ray start ...: up to three times, since Ray waits 15 seconds for its helpers and then dies, which is too
# little where Python loads slowly, as it does the first time (ray-project/ray#65983).
baton_start() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return 0
        ray stop --force
    done
    return 1
}

# The address by which this machine reaches another one: an address, since names need not resolve everywhere.
baton_address_toward() {
    ip -4 route get "$1" | sed -n 's/.* src \([0-9.]*\).*/\1/p'
}

# baton_resources ADDRESS "PREFILL ADDRESSES" "DECODE ADDRESSES": what `ray start --resources` needs, so that workers
# land on the machines that are meant for them. A machine may be in both lists.
baton_resources() {
    local resources=""
    case " $2 " in *" $1 "*) resources="\"baton_prefill\": 1" ;; esac
    case " $3 " in *" $1 "*) resources="${resources:+$resources, }\"baton_decode\": 1" ;; esac
    echo "{$resources}"
}

# baton_stop, on the head of machines of your own: stops Ray on all of them. There `ray down` forgets the machines, which
# it cannot switch off, and leaves Ray running on those that are not the head.
baton_stop() {
    local config="$HOME/ray_bootstrap_config.yaml" user address
    user=$(python -c "import yaml; print(yaml.safe_load(open('$config'))['auth']['ssh_user'])")
    for address in $(python -c "import yaml; print(*yaml.safe_load(open('$config'))['provider']['worker_ips'])"); do
        ssh -i "$HOME/ray_bootstrap_key.pem" -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=no \
            -o UserKnownHostsFile=/dev/null "$user@$address" '. ~/baton/deploy/node.sh; ray stop' </dev/null ||
            echo "Ray was not stopped on $address" >&2 &
    done
    wait
    ray stop
}
