// Fused twins of models/ops.py, called from kernels.py under the same names. Follows prelude.cuh.
//
// Shapes as in ops.py: N rows, C channels, F features, T positions, V vocabulary, D channels of a
// head. Sums are in W, in an order that depends on the shape only: no float atomics, and the same
// bits on every launch.

#define GELU_0 ((W)0.7978845608028654)   // sqrt(2 / pi)
#define GELU_1 ((W)0.035677408136300125)  // 0.044715 GELU_0
#define LOWEST ((W)-3e38)

// ---- linear: the bias, before and after ---------------------------------------------------------

GLOBAL fill_rows(const T *row, T *y, Index n, Index F) {
    EACH(i, n) y[i] = row[i % F];
}

// Column sums of each part of the rows: partial (parts, F). A block has one part and some columns.
GLOBAL column_sums(const T *x, W *partial, Index N, Index F, Index parts) {
    Index part = blockIdx.x % parts, first = N * part / parts, last = N * (part + 1) / parts;
    Index f = blockIdx.x / parts * blockDim.x + threadIdx.x;
    if (f >= F) return;
    W total = 0;
    for (Index r = first; r < last; r++) total += (W)x[r * F + f];
    partial[part * F + f] = total;
}

// ---- GELU ---------------------------------------------------------------------------------------

__device__ W gelu_share(W v) { return (W)0.5 + (W)0.5 * tanh(v * (GELU_0 + GELU_1 * v * v)); }

__device__ W gelu_slope(W v, W s) {
    return s * ((W)1 + ((W)1 - s) * v * ((W)2 * GELU_0 + (W)6 * GELU_1 * v * v));
}

// y = gelu(x + bias), and its slope in x's memory; without a bias (F = 0) x stays as it is.
GLOBAL gelu(T *x, const T *bias, T *y, Index n, Index F) {
    EACH(i, n) {
        W v = (W)x[i] + (F ? (W)bias[i % F] : (W)0), s = gelu_share(v);
        y[i] = T(v * s);
        if (F) x[i] = T(gelu_slope(v, s));
    }
}

// dx in dy's memory.
GLOBAL gelu_backward(T *dy, const T *x, Index n) {
    EACH(i, n) dy[i] = T((W)dy[i] * gelu_slope((W)x[i], gelu_share((W)x[i])));
}

// dx = dy slope in dy's memory, and dx's column sums of each part of the rows: partial (parts, F).
GLOBAL bias_gelu_backward(T *dy, const T *slope, W *partial, Index N, Index F, Index parts) {
    Index part = blockIdx.x % parts, first = N * part / parts, last = N * (part + 1) / parts;
    Index f = blockIdx.x / parts * blockDim.x + threadIdx.x;
    if (f >= F) return;
    W total = 0;
    for (Index i = first * F + f; i < last * F; i += F) {
        dy[i] = T((W)dy[i] * (W)slope[i]);
        total += (W)dy[i];
    }
    partial[part * F + f] = total;
}

// ---- layer norm ---------------------------------------------------------------------------------

GLOBAL layer_norm(
    const T *x, const T *gain, const T *bias, T *y, T *x_hat, W *rstd, Index N, Index C, W eps) {
    EACH_ROW(r, N) {
        const T *row = x + r * C;
        W mean = 0, squares = 0;
        EACH_LANE(c, C) mean += (W)row[c];
        mean = lanes_sum(mean) / (W)C;
        EACH_LANE(c, C) squares += ((W)row[c] - mean) * ((W)row[c] - mean);
        W scale = (W)1 / sqrt(lanes_sum(squares) / (W)C + eps);
        EACH_LANE(c, C) {
            T hat = T(((W)row[c] - mean) * scale);
            x_hat[r * C + c] = hat;
            y[r * C + c] = T(fma((W)hat, (W)gain[c], (W)bias[c]));
        }
        if (LANE == 0) rstd[r] = scale;
    }
}

// dx in dy's memory. A block has one part of the rows: it first sums their columns, into partial
// (parts, 2, C) for gain and bias, and then overwrites them.
GLOBAL layer_norm_backward(
    T *dy, const T *x_hat, const W *rstd, const T *gain, W *partial, Index N, Index C) {
    Index first = N * blockIdx.x / gridDim.x, last = N * (blockIdx.x + 1) / gridDim.x;
    for (Index c = threadIdx.x; c < C; c += blockDim.x) {
        W dgain = 0, dbias = 0;
        for (Index r = first; r < last; r++) {
            dgain += (W)dy[r * C + c] * (W)x_hat[r * C + c];
            dbias += (W)dy[r * C + c];
        }
        partial[2 * blockIdx.x * C + c] = dgain;
        partial[(2 * blockIdx.x + 1) * C + c] = dbias;
    }
    __syncthreads();
    for (Index r = first + threadIdx.x / LANES; r < last; r += blockDim.x / LANES) {
        T *d = dy + r * C;
        const T *hat = x_hat + r * C;
        W mean = 0, product = 0;
        EACH_LANE(c, C) {
            mean += (W)d[c] * (W)gain[c];
            product += (W)d[c] * (W)gain[c] * (W)hat[c];
        }
        mean = lanes_sum(mean) / (W)C;
        product = lanes_sum(product) / (W)C;
        EACH_LANE(c, C) d[c] = T(((W)d[c] * (W)gain[c] - mean - (W)hat[c] * product) * rstd[r]);
    }
}

// Adds the parts' sums, in order, to one gradient or two: partial (parts, count, C).
GLOBAL add_parts(const W *partial, W *first, W *second, Index parts, Index count, Index C) {
    EACH(i, C * count) {
        W *out = i < C ? first + i : second + (i - C);
        W total = 0;
        for (Index part = 0; part < parts; part++) total += partial[part * C * count + i];
        *out += total;
    }
}

// ---- causal attention ---------------------------------------------------------------------------

// p = softmax(scale scores) over the positions up to the row's own, 0 after it; rows of T, T rows
// per head. p may be scores.
GLOBAL causal_softmax(const W *scores, T *p, W *lse, Index N, Index length, W scale) {
    EACH_ROW(r, N) {
        const W *row = scores + r * length;
        Index seen = r % length + 1;
        W highest = LOWEST, total = 0;
        EACH_LANE(s, seen) highest = row[s] * scale > highest ? row[s] * scale : highest;
        highest = lanes_max(highest);
        EACH_LANE(s, seen) total += exp(row[s] * scale - highest);
        total = lanes_sum(total);
        EACH_LANE(s, length)
            p[r * length + s] = T(s < seen ? exp(row[s] * scale - highest) / total : (W)0);
        if (LANE == 0) lse[r] = highest + log(total);
    }
}

// p again, and ds = p (dp - sum(dy y)) scale, summed over the D channels of the row's head; heads x
// T rows. dy and y are (T, heads, D). p may be scores, ds may be dp.
GLOBAL causal_softmax_backward(
    const W *scores, const W *dp, const W *lse, const T *dy, const T *y, T *p, T *ds,
    Index N, Index length, Index D, W scale) {
    EACH_ROW(r, N) {
        Index seen = r % length + 1, head = r / length, heads = N / length;
        const Index at = ((r % length) * heads + head) * D;
        W sum = 0;
        EACH_LANE(d, D) sum += (W)dy[at + d] * (W)y[at + d];
        sum = lanes_sum(sum);
        EACH_LANE(s, length) {
            Index i = r * length + s;
            W share = s < seen ? exp(scores[i] * scale - lse[r]) : (W)0;
            W slope = s < seen ? share * (dp[i] - sum) * scale : (W)0;
            p[i] = T(share);
            ds[i] = T(slope);
        }
    }
}

// ---- embedding ----------------------------------------------------------------------------------

// dw[token] += the sum of dy's rows at its positions; `order` sorts the tokens stably. The thread
// of a token's first row adds all of them: a fixed order, and every row of dw is written once.
GLOBAL embedding_backward(
    const T *dy, const Index *tokens, const Index *order, W *dw, Index N, Index C) {
    EACH(i, N * C) {
        Index n = i / C, c = i % C, token = tokens[order[n]];
        if (n && tokens[order[n - 1]] == token) continue;
        W total = 0;
        for (; n < N && tokens[order[n]] == token; n++) total += (W)dy[order[n] * C + c];
        dw[token * C + c] += total;
    }
}

// ---- cross entropy ------------------------------------------------------------------------------

// z becomes (p - onehot(target)) weight; losses[r] = -log p[target]. Rows with a negative target
// become 0. The highest logit and the sum of exponentials take one pass: a new highest rescales the
// sum so far.
GLOBAL cross_entropy(T *z, const Index *targets, double *losses, Index N, Index V, W weight) {
    EACH_ROW(r, N) {
        T *row = z + r * V;
        Index target = targets[r];
        W highest = LOWEST, total = 0;
        EACH_LANE(v, V) {
            W value = (W)row[v];
            if (value > highest) {
                total = total * exp(highest - value) + (W)1;
                highest = value;
            } else {
                total += exp(value - highest);
            }
        }
        W top = lanes_max(highest);
        total = lanes_sum(total * exp(highest - top));
        if (LANE == 0) losses[r] = target < 0 ? 0 : (double)(log(total) - ((W)row[target] - top));
#ifdef __CUDACC__
        __syncwarp();  // the loss is read before the row is written over
#endif
        EACH_LANE(v, V) {
            W p = exp((W)row[v] - top) / total;
            row[v] = T(target < 0 ? (W)0 : (p - (W)(v == target)) * weight);
        }
    }
}
