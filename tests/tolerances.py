"""Every floating-point tolerance of the tests, each with its reason.  No test file has one of its own."""

# quant: bytes and numbers

# value = d*sc*q - dmin*mn in float32 takes four roundings of half a unit in the last place (2^-24).
INTEGER_PARTS_REL = 4 * 2.0**-24

# The aim of this project: own K quantisers lose at most 2 % more than ggml's (measured: 0.1 to 29 % less).
QUANT_RMSE_OVER_GGML = 1.02

# The same blocks; only the order of a float64 sum may differ from that of the recorded run.
QUANT_RMSE_SAME_REL = 1e-9

# A constant block is one level times one scale.  What is left is the rounding of d to float16, which for small
# values is a denormal: 0.02/31/63 = 1.0e-5 in steps of 6.0e-8.
QUANT_CONSTANT_REL = 2.0**-8
