// Fused twins of what zmpi computes on shards, called from kernels.py. Follows models/prelude.cuh.

// ---- sums.py ------------------------------------------------------------------------------------

// Adds n rows of `length` elements in order onto out, or onto zero if `fresh`.
GLOBAL add_rows(const T *rows, W *out, Index n, Index length, int fresh) {
    EACH(i, length) {
        W total = fresh ? (W)0 : out[i];
        for (Index r = 0; r < n; r++) total += (W)rows[r * length + i];
        out[i] = total;
    }
}

// The same from zero, rounded once.
GLOBAL add_rows_rounded(const T *rows, T *out, Index n, Index length) {
    EACH(i, length) {
        W total = 0;
        for (Index r = 0; r < n; r++) total += (W)rows[r * length + i];
        out[i] = T(total);
    }
}

// ---- optim.py -----------------------------------------------------------------------------------

// Sums of squares, in double, of `parts` parts of each piece of `length`: partial (pieces, parts).
GLOBAL squares(const T *vector, double *partial, Index length, Index pieces, Index parts) {
    EACH_ROW(r, pieces * parts) {
        Index start = r / parts * length, part = r % parts;
        Index first = start + length * part / parts, last = start + length * (part + 1) / parts;
        double total = 0;
        for (Index i = first + LANE; i < last; i += LANES)
            total += (double)(W)vector[i] * (double)(W)vector[i];
        total = lanes_sum(total);
        if (LANE == 0) partial[r] = total;
    }
}

// One AdamW update of p (the master), m and v, element by element. `spans`: (start, stop, decays)
// of each parameter, in order; the rest is padding, and unchanged. `rounded`, if any, becomes p in
// T.
GLOBAL adamw(
    W *p, const T *gradient, W *m, W *v, T *rounded, const Index *spans, Index count, Index n,
    W factor, W kept, W beta1, W beta2, W step_size, W root_of_correction, W eps) {
    EACH(i, n) {
        Index s = 0;
        while (s < count && i >= spans[3 * s + 1]) s++;
        if (s == count || i < spans[3 * s]) continue;
        W g = (W)gradient[i] * factor;
        m[i] = beta1 * m[i] + ((W)1 - beta1) * g;
        v[i] = beta2 * v[i] + ((W)1 - beta2) * g * g;
        W decayed = spans[3 * s + 2] ? p[i] * kept : p[i];
        p[i] = decayed - step_size * m[i] / (sqrt(v[i]) / root_of_correction + eps);
        if (rounded) rounded[i] = T(p[i]);
    }
}
