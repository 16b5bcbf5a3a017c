#!/usr/bin/env bash
# All that one CUDA device can tell, within 15 minutes, into a folder of at most 16 small files:
#
#   benchmarks/device_run.sh OUT [PART ...]      # all parts, or these: facts overhead per_module compiled accuracy programs inference batch_size allocator convolutions tests
#
# Needs PyTorch's CUDA build, Lightning for overhead and batch_size, pytest for tests, transformers, torchvision and timm for inference and tests, and
# for programs what is there of benchmarks/programs/requirements.txt. No network: nothing is installed. facts, overhead and per_module run alone, as
# they read the whole device or the clock. The others measure memory and run side by side, each case in a process of its own; a suggested batch size
# counts what its neighbours hold, which makes it smaller by 5 % of that at most. PYTHON names the python; JOBS how many processes run at a time, about
# (fewer on a device of less than 64 GiB); LIMIT_S how long those side by side may take (600). On a virtual device (VGPU=1) the same. What there is
# after LIMIT_S stays, of convolutions and allocator only if they are done. A part that fails or takes too long leaves the end of its log in
# failures.log. What was measured is predicted elsewhere:
#
#   benchmarks/accuracy.py compare --measured OUT/accuracy.json.gz --json OUT/predicted.json.gz --markdown OUT/accuracy.md
#   benchmarks/compiled.py --measured OUT/compiled.measured.json          # and so real_programs.py and inference.py
#
# device_compare.py sets two such folders side by side.
set -uo pipefail
: "${1:?where the results go}"
python=$(command -v "${PYTHON:-python}") || { echo "there is no ${PYTHON:-python}: name it with PYTHON" >&2; exit 2; }
[[ $python == /* ]] || python=$PWD/$python
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/.."
known=" facts overhead per_module compiled accuracy programs inference batch_size allocator convolutions tests "
parts=" ${*:-$known} "
for name in $parts; do [[ $known == *" $name "* ]] || { echo "there is no part $name, only$known" >&2; exit 2; }; done
# nproc would answer with OMP_NUM_THREADS.
cores=$(env -u OMP_NUM_THREADS nproc)
jobs=${JOBS:-$(( cores > 14 ? 14 : cores ))}
limit_s=${LIMIT_S:-600}
left() { echo $(( deadline - SECONDS )); } # seconds for what runs side by side
share() { echo $(( (jobs * $1 + 13) / 14 )); } # of 14 processes so many, one at least
export PYTHONPATH="$PWD:$PWD/benchmarks:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1

part() { # name, seconds at most, command
  local name=$1 limit=$2 began=$SECONDS rc=0
  shift 2
  [[ $parts == *" $name "* ]] || return 0
  [ "$limit" -gt 0 ] || { echo "$name: no time was left" | tee -a "$out/parts.txt"; return 0; }
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1 || rc=$?
  touch "$out/parts.txt"
  sed -i "/^$name: /d" "$out/parts.txt"
  echo "$name: exit code $rc, $((SECONDS - began)) s" | tee -a "$out/parts.txt"
  [ "$rc" = 0 ] || { echo "== $name: exit code $rc"; tail -c 4000 "$out/$name.log"; echo; } >> "$out/failures.log"
  rm "$out/$name.log"
}

allocator() {
  local folder
  folder=$(mktemp -d)
  "$python" tests/recorded/record_allocator.py --steps 32 --jobs "$(share 2)" --out "$folder" && tar -cf "$out/allocator.tar" -C "$folder" .
  local rc=$?
  rm -r "$folder"
  return $rc
}
export -f allocator share
export out python jobs

part facts 120 "$python" benchmarks/device_facts.py --out "$out/facts.json"
part overhead 120 "$python" benchmarks/overhead.py --device cuda --rounds 5 --out "$out"
part per_module 60 "$python" benchmarks/per_module.py --device cuda --out "$out"
deadline=$(( SECONDS + limit_s ))
# Inductor's own processes, of which each training would start as many as there are cores.
export TORCHINDUCTOR_COMPILE_THREADS=1
part compiled "$(left)" "$python" benchmarks/compiled.py --jobs "$(share 6)" --measure "$out/compiled.measured.json" &
part accuracy "$(left)" "$python" benchmarks/accuracy.py measure --jobs "$(share 3)" --out "$out/accuracy.json.gz" &
part programs "$(left)" "$python" benchmarks/real_programs.py --jobs "$(share 4)" --measure "$out/programs.measured.json" &
part batch_size "$(left)" "$python" benchmarks/batch_size.py --here 12 --jobs "$(share 3)" --out "$out" &
{
  part convolutions "$(left)" "$python" tests/recorded/record_convolutions.py --out "$out"
  part allocator "$(left)" bash -c allocator
  part inference "$(left)" "$python" benchmarks/inference.py --jobs "$(share 2)" --measure "$out/inference.measured.json"
  part tests "$(left)" "$python" -m pytest -q -m cuda -p no:cacheprovider tests/record/test_recorder_cuda.py tests/prediction/test_modules_cuda.py tests/diagnose/test_out_of_memory_cuda.py
} &
wait
! grep -qv "exit code 0," "$out/parts.txt"
