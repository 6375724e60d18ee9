#!/usr/bin/env bash
# On a machine with a GPU: build, check and time, in under 8 minutes; a short table comes last.
#
#   benchmarks/gpu.sh
#   PYTHON: of an environment with CuPy and mpi4py; RANKS=2 (they may share a GPU);
#   PEAK_BF16, PEAK_FP32: TFLOP/s of the GPU (default: H100 and H200, dense, 989 and 67)
set -uo pipefail
cd "$(dirname "$0")/.."
deadline=$((SECONDS + ${LIMIT:-470}))
left() { echo $((deadline - SECONDS > 1 ? deadline - SECONDS : 1)); }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

python=${PYTHON:-python3}
if ! "$python" -c 'import cupy, mpi4py.MPI, pytest, ml_dtypes, tqdm' 2>/dev/null; then
  echo "== building .venv-gpu (PYTHON=$python lacks CuPy, mpi4py or pytest)"
  [ -x .venv-gpu/bin/python ] || python3 -m venv .venv-gpu
  timeout "$(left)" .venv-gpu/bin/pip install -q -e '.[cuda13,kernels,test]' \
    'cupy-cuda13x[ctk]>=14' || exit 1
  python=.venv-gpu/bin/python
fi
mpirun=${MPIRUN:-$(dirname "$(command -v "$python")")/mpirun}
[ -x "$mpirun" ] || mpirun=mpirun
export MPIRUN=$mpirun
gpus=$("$python" -c 'import cupy; print(cupy.cuda.runtime.getDeviceCount())' 2>/dev/null || echo 0)
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
table=$(mktemp)

echo "== machine"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
  echo "no nvidia-smi"
"$python" -c 'import cupy, numpy; print("CuPy", cupy.__version__, "NumPy", numpy.__version__)'
[ "$gpus" -gt 0 ] || { echo "no GPU: nothing can be checked or timed here" >&2; exit 1; }

echo "== checks, on one GPU"
status=0
timeout $(($(left) < 240 ? $(left) : 240)) "$python" -m pytest tests/gpu -q -x || status=$?

echo "== timing"
for precision in bfloat16 float32; do
  peak=$([ $precision = bfloat16 ] && echo "${PEAK_BF16:-989}" || echo "${PEAK_FP32:-67}")
  timeout "$(left)" "$mpirun" -n "$ranks" "$python" benchmarks/gpu.py \
    --precision $precision --peak "$peak" --seconds 15 | tee -a "$table"
done

echo "== table (checks: $([ $status = 0 ] && echo passed || echo "FAILED, status $status"))"
cat "$table"
exit $status
