#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU evidence: tests, compute-sanitizer and a small benchmark on this machine's GPU, written into section `single`
# of tests/gpu/record.json.
#
#   scripts/gpu_verify.sh      logs and results go to $OUT (default: build/gpu)
#
# The benchmark ends after $BENCH_SECONDS (default: 1800) with the rows it has; $PEERS is its --peers.
source "$(dirname "${BASH_SOURCE[0]}")/gpu_env.sh"

rm -f "$out/tests.xml" "$out/bench.json"  # of an earlier run
status=0
"$python" -m pytest tests/gpu -m gpu -q --junit-xml "$out/tests.xml" 2>&1 | tee "$out/tests.log" || status=1
seconds=${BENCH_SECONDS:-1800}
timeout "$seconds" "$python" scripts/gpu_bench.py "$out/bench.json" 2>&1 | tee "$out/bench.log" || status=1

# The sanitizer slows everything down and times nothing, so its tools run side by side. Nothing may spin under it. All
# look at our kernels alone, since the oracle's would take minutes, but for initcheck, which has to see every write.
ours=(--kernel-name kns=msa_icp)
tools=(memcheck racecheck synccheck initcheck)
sanitize() {
  FLASHINFER_MSA_TEST_SHAPES=small compute-sanitizer --tool "$1" "${@:2}" --error-exitcode 9 --print-limit 20 \
    "$python" -m pytest tests/gpu -m "gpu and not traps" -q -p no:cacheprovider > "$out/$1.log" 2>&1
}
arguments=()
for tool in "${tools[@]}"; do
  options=()
  [[ $tool == initcheck ]] || options=("${ours[@]}")
  # With the barriers that it tracks by itself, the tool runs out in the scorer and fails the launch.
  [[ $tool != synccheck ]] || options+=(--num-cuda-barriers 1024)
  sanitize "$tool" "${options[@]}" &
  arguments+=(--sanitizer "$tool=$out/$tool.log")
done
for job in $(jobs -p); do wait "$job" || status=1; done
for tool in "${tools[@]}"; do
  echo "== $tool"
  tail -n 4 "$out/$tool.log"
done

"$python" scripts/gpu_record.py --write single --junit "$out/tests.xml" --bench "$out/bench.json" "${arguments[@]}"
cp tests/gpu/record.json "$out/record.json"
exit $status
