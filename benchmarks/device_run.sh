#!/usr/bin/env bash
# All that one CUDA device can tell, within 20 minutes, into a folder of at most 16 small files:
#
#   benchmarks/device_run.sh OUT [PART ...]      # all parts, or these: facts allocator convolutions accuracy predictions overhead per_module batch_size tests
#
# Needs PyTorch's CUDA build, for overhead and batch_size Lightning, for tests pytest and transformers, and no network; nothing is installed. PYTHON
# names the python; JOBS how many processes run at a time, where that changes no figure (fewer on a device of less than 64 GiB); SLOWER=4 gives each
# part four times as long. On a virtual device (VGPU=1) the same. A part that fails or takes too long leaves the end of its log in failures.log, and
# the others run. device_compare.py sets two such folders side by side.
set -uo pipefail
: "${1:?where the results go}"
python=$(command -v "${PYTHON:-python}") || { echo "there is no ${PYTHON:-python}: name it with PYTHON" >&2; exit 2; }
[[ $python == /* ]] || python=$PWD/$python
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/.."
known=" facts allocator convolutions accuracy predictions overhead per_module batch_size tests "
parts=" ${*:-$known} "
for name in $parts; do [[ $known == *" $name "* ]] || { echo "there is no part $name, only$known" >&2; exit 2; }; done
# nproc would answer with OMP_NUM_THREADS. Twelve trainings at a time take less than 64 GiB of the device and of the host.
cores=$(env -u OMP_NUM_THREADS nproc)
jobs=${JOBS:-$(( cores > 12 ? 12 : cores ))}
export PYTHONPATH="$PWD:$PWD/benchmarks:$PWD/tests" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
failed=0

part() { # name, seconds at most, command
  local name=$1 limit=$(($2 * ${SLOWER:-1})) began=$SECONDS rc=0
  shift 2
  [[ $parts == *" $name "* ]] || return 0
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1 || rc=$?
  touch "$out/parts.txt"
  sed -i "/^$name: /d" "$out/parts.txt"
  echo "$name: exit code $rc, $((SECONDS - began)) s" | tee -a "$out/parts.txt"
  if [ "$rc" != 0 ]; then
    failed=1
    { echo "== $name: exit code $rc"; tail -c 4000 "$out/$name.log"; echo; } >> "$out/failures.log"
  fi
  rm "$out/$name.log"
}

allocator() {
  local folder
  folder=$(mktemp -d)
  "$python" tests/recorded/record_allocator.py --steps 32 --jobs "$jobs" --out "$folder" && tar -cf "$out/allocator.tar" -C "$folder" .
  local rc=$?
  rm -r "$folder"
  return $rc
}
export -f allocator
export out python jobs

part facts 30 "$python" benchmarks/device_facts.py --out "$out/facts.json"
part allocator 60 bash -c allocator
part convolutions 90 "$python" tests/recorded/record_convolutions.py --out "$out"
part accuracy 140 "$python" benchmarks/accuracy.py measure --jobs "$jobs" --out "$out/accuracy.json.gz"
# These need no device, so what is missing in the end can be had elsewhere.
part predictions 200 "$python" benchmarks/accuracy.py compare --jobs "$jobs" --measured "$out/accuracy.json.gz" --json "$out/predicted.json.gz" --markdown "$out/accuracy.md"
part overhead 90 "$python" benchmarks/overhead.py --device cuda --rounds 5 --out "$out"
part per_module 60 "$python" benchmarks/per_module.py --device cuda --out "$out"
part batch_size 380 "$python" benchmarks/batch_size.py --here 12 --jobs "$jobs" --out "$out"
part tests 150 "$python" -m pytest -q -m cuda -p no:cacheprovider tests/record/test_recorder_cuda.py tests/prediction/test_modules_cuda.py tests/diagnose/test_out_of_memory_cuda.py
exit $failed
