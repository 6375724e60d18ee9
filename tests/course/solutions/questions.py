"""Ten questions of accounting. Replace each None by a number (or an expression).

Ψ is the number of parameters, N that of ranks. Float32 with Adam: 4 bytes a parameter for the
weight, 4 for its gradient, 8 for the optimizer's two moments. The paper's recipe (float16 with
float32 copies): 2 + 2 + 12 bytes. A rank that takes part in a collective over a vector of E
elements sends (N - 1) / N * E of them (an all-gather or a reduce-scatter). Padding does not count.
State is all three: weights, gradients and what the optimizer keeps.

Answers may be off by 0.5 %; 1 GB is 1e9 bytes. Read zmpi/core/stages.py, and check yourself with
`python -m zmpi.plan`.
"""

ANSWERS = {
    # 1. Float32 with Adam, 1e9 parameters, 8 ranks, stage 1: bytes of state on each rank?
    1: 1e9 * (4 + 4 + 8 / 8),
    # 2. The same at stage 2?
    2: 1e9 * (4 + 4 / 8 + 8 / 8),
    # 3. The same at stage 3?
    3: 1e9 * 16 / 8,
    # 4. The paper's recipe, 7.5e9 parameters, 64 ranks, stage 2: GB of state on each rank?
    4: 7.5e9 * (2 + (2 + 12) / 64) / 1e9,
    # 5. The paper's recipe, 32e9 bytes on each of 64 ranks, stage 3: the largest number of
    #    parameters whose state fits?
    5: 32e9 / (16 / 64),
    # 6. The same at stage 0?
    6: 32e9 / 16,
    # 7. Stage 3, 1e9 parameters, every unit gathered twice and reduced once per micro-batch, 4
    #    micro-batches: elements that a step's collectives carry (each collective over E elements
    #    counts E)?
    7: 3 * 4 * 1e9,
    # 8. Stage 2, the same 1e9 parameters and 4 micro-batches?
    8: (4 + 1) * 1e9,
    # 9. Stage 3, 1e9 parameters in float32, 16 ranks, 1 micro-batch: bytes that each rank sends in
    #    a step?
    9: 3 * 1e9 * 15 / 16 * 4,
    # 10. Stage 3, 1e9 float32 parameters, 16 ranks, 1 micro-batch of T tokens a rank; a step
    #    computes 6e9 FLOPs a token, a rank does 1e14 FLOP/s and sends 1e10 bytes/s. From how many
    #    tokens a rank does computing take as long as the network?
    10: 3 * 1e9 * 15 / 16 * 4 / 1e10 * 1e14 / 6e9,
}
