#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gathers the GPU evidence: runs tests, compute-sanitizer and the benchmark on this machine's GPU, and writes section
# `single` of tests/gpu/record.json.
#
#   scripts/gpu_verify.sh      logs and results go to $OUT (default: build/gpu)
#
# The benchmark ends after $BENCH_SECONDS (default: 1800) with the rows it has. $PEERS is its --peers. The sanitizer's
# tools may take $SANITIZER_SECONDS (default: 3600). $SANITIZER_TOOLS names those to run; a record needs all four. Parts
# that an earlier run of the same sources finished in $OUT are not run again, so several runs can share the work.
source "$(dirname "${BASH_SOURCE[0]}")/gpu_env.sh"

digest=$("$python" scripts/gpu_record.py --digest)
if [[ $(cat "$out/sources" 2> /dev/null) != "$digest" ]]; then
  rm -f "$out"/{tests.xml,older.xml,bench.json,memcheck.log,racecheck.log,synccheck.log,initcheck.log}
  echo "$digest" > "$out/sources"
fi

# Results of failed or interrupted parts are only for this run. Later runs find only the names of finished parts.
status=0 rows=$out/bench.json

# Under the sanitizer nothing is timed, so its tools run in parallel, and beside the tests. If there are several GPUs, the
# slowest tool gets its own. No kernel may spin under it. All tools check only our kernels, because the reference's would
# take minutes, except initcheck, which must see every write.
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ours=(--kernel-name kns=msa_icp)
tools=(memcheck racecheck synccheck initcheck)
sanitize() {
  local gpu=$((gpus - 1)) tests=(tests/gpu)
  if [[ $1 == racecheck ]]; then
    gpu=0
    tests+=(--ignore tests/gpu/test_prepared_steps.py)  # other tests launch the same kernels
  fi
  CUDA_VISIBLE_DEVICES=$gpu FLASHINFER_MSA_TEST_SHAPES=small timeout "${SANITIZER_SECONDS:-3600}" \
    compute-sanitizer --tool "$1" "${@:2}" --error-exitcode 9 --print-limit 20 \
    "$python" -m pytest "${tests[@]}" -m "gpu and not traps" -q -p no:cacheprovider > "$out/$1.log" 2>&1
}
# Whether a tool and the tests under it finished and found nothing.
is_clean() {
  grep -qs "SUMMARY: 0 " "$1" && grep -q "[0-9] passed" "$1" &&
    ! grep -v "SUMMARY: 0 " "$1" | grep -Eq "SUMMARY: [1-9]|[0-9] (failed|error)"
}
arguments=()
for tool in "${tools[@]}"; do
  arguments+=(--sanitizer "$tool=$out/$tool.log")
  if is_clean "$out/$tool.log" || [[ " ${SANITIZER_TOOLS:-${tools[*]}} " != *" $tool "* ]]; then
    continue
  fi
  options=()
  [[ $tool == initcheck ]] || options=("${ours[@]}")
  # With its default number of tracked barriers, the tool runs out of them in the scorer and fails the launch.
  [[ $tool != synccheck ]] || options+=(--num-cuda-barriers 1024)
  sanitize "$tool" "${options[@]}" &
done

# run_tests <name> <pytest arguments...> sets $report to its report, which has its final name if all tests pass.
run_tests() {
  local name=$1 failed=0
  report=$out/$name.xml
  [[ ! -f $report ]] || return 0
  report=$out/$name.part.xml
  "$python" -m pytest tests/gpu -m gpu -q --junit-xml "$report" "${@:2}" 2>&1 | tee "$out/$name.log" || failed=$?
  case $failed in
    0) mv "$report" "$out/$name.xml" && report=$out/$name.xml ;;
    1) status=1 ;;
    *) rm -f "$report" && status=1 ;;  # the report is incomplete
  esac
}
run_tests tests
tests=$report
# Test the cubins for older drivers, which this driver can load too.
FLASHINFER_MSA_DRIVER=12.9 FLASHINFER_MSA_TEST_SHAPES=small run_tests older
older=$report

# Nothing runs beside the benchmark.
for job in $(jobs -p); do wait "$job" || status=1; done
for tool in "${tools[@]}"; do
  echo "== $tool"
  tail -n 4 "$out/$tool.log" || status=1
done

# Check an installation of the wheel beside FlashInfer.
install_rows=()
if [[ -n $wheel ]] && "$python" -c 'import flashinfer' 2> /dev/null; then
  "$python" scripts/gpu_install.py "$out/install.json" --wheel "$wheel" 2>&1 | tee "$out/install.log" || status=1
  install_rows=(--bench "$out/install.json")
fi
if [[ ! -f $rows ]]; then
  rows=$out/bench.part.json
  rm -f "$rows"
  if timeout "${BENCH_SECONDS:-1800}" "$python" scripts/gpu_bench.py "$rows" 2>&1 | tee "$out/bench.log"; then
    mv "$rows" "$out/bench.json" && rows=$out/bench.json
  else
    status=1
  fi
fi

"$python" scripts/gpu_record.py --write single --junit "$tests" --older "$older" --bench "$rows" \
  "${install_rows[@]}" "${arguments[@]}"
keep_record
exit $status
