#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gathers the evidence of ranks with a GPU each, on a machine with 2 or 4 GPUs: runs tests, faults, examples, soak and
# benchmark, and writes section `multi_gpu` or `multi_gpu_x4` of tests/gpu/record.json.
#
#   scripts/gpu_verify_group.sh      logs and results go to $OUT (default: build/gpu)
#
# If a step fails or takes too long, the others still run and the exit status is 1. All steps together take at most
# $SECONDS_IN_ALL (default: 530). The soak runs $LAYER_STEPS (default: a million) layers of each row kind. The benchmark
# ends after $BENCH_SECONDS (default: 150) with the rows it has, and $PEERS is its --peers.
source "$(dirname "${BASH_SOURCE[0]}")/gpu_env.sh"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus >= 4)); then
  ranks=4 section=multi_gpu_x4
elif ((gpus >= 2)); then
  ranks=2 section=multi_gpu
else
  echo "needs 2 or 4 GPUs, torch finds $gpus" >&2
  exit 1
fi
# All ranks are on one host, so the loopback interface is enough and the host's name need not resolve.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}

# step <name> <seconds> <command...> runs the command with a log of that name, which ends with the exit status.
failed=()
deadline=$((SECONDS + ${SECONDS_IN_ALL:-530}))
step() {
  local name=$1 seconds=$2 status=0 left=$((deadline - SECONDS))
  shift 2
  ((seconds < left)) || seconds=$((left > 1 ? left : 1))
  echo "== $name"
  # An interrupted pytest still writes its report.
  timeout --signal INT --kill-after 10 "$seconds" "$@" > "$out/$name.log" 2>&1 || status=$?
  ((status == 0)) || failed+=("$name")
  tail -n 12 "$out/$name.log"
  echo "exit status $status" >> "$out/$name.log"
}
launch=("$python" -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node "$ranks")
test_with=("$python" -m pytest -m gpu -q -p no:cacheprovider --durations 8)

comm_tests=(tests/gpu/test_comm_processes.py
  tests/gpu/test_protocol.py::test_ranks_on_two_gpus_store_into_each_other
  tests/gpu/test_protocol.py::test_tensors_of_two_gpus_are_refused)
reports=(group faults comm)
for report in "${reports[@]}"; do rm -f "$out/$report.xml"; done  # of an earlier run
rm -f "$out/soak.json" "$out/group_bench.json"

step group 60 "${test_with[@]}" tests/gpu/test_group.py --junit-xml "$out/group.xml"
step soak 90 "${launch[@]}" scripts/soak.py --layer-steps "${LAYER_STEPS:-1000000}" --json "$out/soak.json"
step group_bench "${BENCH_SECONDS:-150}" "${launch[@]}" scripts/gpu_bench.py --group "$out/group_bench.json"
step faults 90 "${test_with[@]}" tests/gpu/test_faults.py --junit-xml "$out/faults.xml"
step comm 60 "${test_with[@]}" "${comm_tests[@]}" --junit-xml "$out/comm.xml"
arguments=()
for example in tp_decode tp_serving_step; do
  step "$example" 60 "${launch[@]}" "scripts/examples/$example.py"
  arguments+=(--example "$example=$out/$example.log")
done

for report in "${reports[@]}"; do
  arguments+=(--junit "$out/$report.xml")
done
"$python" scripts/gpu_record.py --write "$section" --soak "$out/soak.json" --bench "$out/group_bench.json" \
  "${arguments[@]}" || failed+=(record)
keep_record
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
