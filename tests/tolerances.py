"""Every floating-point tolerance of the tests, each with its reason.  No test file has one of its own."""

# quant: bytes and numbers

# value = d*sc*q - dmin*mn in float32 takes four roundings of half a unit in the last place (2^-24).
INTEGER_PARTS_REL = 4 * 2.0**-24

# The aim of this project: own K quantisers lose at most 2 % more than ggml's (measured: 0.1 to 29 % less).
QUANT_RMSE_OVER_GGML = 1.02

# The same blocks; only the order of a float64 sum may differ from that of the recorded run.
QUANT_RMSE_SAME_REL = 1e-9

# A constant block is one level times one scale.  What is left is the rounding of d to float16, where small
# values are denormals: 0.02/31/63 = 1.0e-5 in steps of 6.0e-8.
QUANT_CONSTANT_REL = 2.0**-8

# oracle: the model against other programs -------------------------------------------------------------------------

# transformers in float64 is the same arithmetic in another order (measured: 5e-14 on values up to 20).
ORACLE_F64_ABS = 1e-11

# Two float32 programs, each 1e-5 to 3e-5 from float64 on logits of deviation 1.6; layer outputs are measured in
# units of their deviation, 1.5 to 7.
ORACLE_F32_ABS = 1e-4

# The same program on another machine: matrix products in another order, float32 and float64 (and int32: none).
ORACLE_AGAIN_ABS = {"float32": 1e-4, "float64": 1e-11, "int32": 0}

# llama.cpp reads GELU from a table in float16 (11 bits): normalised mean squared error, measured 1.2e-6 and less.
LLAMA_CPP_NMSE = 1e-5

# Quantised weights: both round activations to int8, in blocks and with scales of their own, and the errors of seven
# layers of random weights add up (measured: 7.6e-3, as far as either is from float activations).
LLAMA_CPP_INT8_NMSE = 1.5e-2

# refimpl: the definition against its laws

# A few dozen float64 operations on numbers of size 1: sums of up to 256 terms lose less than 256 * 2^-53 = 3e-14.
FLOAT64 = 1e-13

# cos and sin of angles of up to 1003 in float64: the angle itself is rounded by 1003 * 2^-53 = 1.1e-13.
ROPE_FLOAT64 = 1e-11

# Logits around 1000 in float64 hold their differences to 1000 * 2^-53 only.
ROUTE_SHIFTED = 1e-12

# The whole model in float64, cut in other ways: dozens of layers' sums of FLOAT64's kind, amplified by norms.
MODEL_FLOAT64 = 1e-11

# The same in float32, on logits of deviation 1.6: float64's ratio times 2^29, and far below what a wrong term does.
MODEL_FLOAT32 = 2e-4

# Equal numbers scaled before or after a matrix product: one float32 rounding of the stored weight each.
SCALE_MOVED = 1e-6
