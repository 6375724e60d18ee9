// Types and reductions for all kernels. One source, compiled once per number type:
//   T  the type of arrays (-D FLOAT16, -D BFLOAT16, -D FLOAT64; else float)
//   W  the type to compute and sum in: float, or double for double
// LANES threads share a row. Compiled for a CPU (by the tests), a block is one thread and a row has
// one lane: the same source, run in a loop.
#if defined(BFLOAT16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 T;
#elif defined(FLOAT16)
#include <cuda_fp16.h>
typedef __half T;
#elif defined(FLOAT64)
typedef double T;
#else
typedef float T;
#endif

#if defined(FLOAT64)
typedef double W;
#else
typedef float W;
#endif

typedef long long Index;

#define GLOBAL extern "C" __global__ void

// Loop over n elements, with all threads of all blocks.
#define EACH(i, n) \
    for (Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x; i < (n); \
         i += (Index)gridDim.x * blockDim.x)

#ifdef __CUDACC__
#define LANES 32
#define LANE (threadIdx.x % LANES)

template <typename V>
__device__ V lanes_sum(V value) {
    for (int offset = LANES / 2; offset; offset /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

template <typename V>
__device__ V lanes_max(V value) {
    for (int offset = LANES / 2; offset; offset /= 2) {
        V other = __shfl_xor_sync(0xffffffffu, value, offset);
        value = other > value ? other : value;
    }
    return value;
}
#else
#define LANES 1
#define LANE 0
#define lanes_sum(value) (value)
#define lanes_max(value) (value)
#endif

// Loop over n rows, with all groups of lanes.
#define EACH_ROW(r, n) \
    for (Index r = (blockIdx.x * (Index)blockDim.x + threadIdx.x) / LANES; r < (n); \
         r += (Index)gridDim.x * blockDim.x / LANES)
// Loop over n columns, with the lanes of a row.
#define EACH_LANE(c, n) for (Index c = LANE; c < (n); c += LANES)
