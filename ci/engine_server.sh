#!/usr/bin/env bash
# A server of vLLM or SGLang and the load that it must carry: 16 requests of 8 clients. Needs the models of `engine_cases.py models` in the current
# folder.
#     harness exec --memory 24GiB -- ci/engine_server.sh [sglang] [OPTION OF THE SERVER]…
port=$((20000 + $$ % 10000))
command=(vllm serve tiny-llama)
if [[ ${1-} == sglang ]]; then
    command=(python -m sglang.launch_server --model-path tiny-llama)
    shift
fi
"${command[@]}" --load-format dummy --port "$port" "$@" &
server=$!
trap 'kill -INT $server; wait $server' EXIT
until curl -sf "localhost:$port/health"; do
    kill -0 $server || exit 1
    sleep 0.5
done
request='{"model": "tiny-llama", "prompt": "Hello", "max_tokens": 100, "ignore_eos": true}'
seq 16 | xargs -P 8 -I{} curl -sf "localhost:$port/v1/completions" -H 'Content-Type: application/json' -d "$request" -o /dev/null || exit 1
echo "server ok"
