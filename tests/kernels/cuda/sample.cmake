# Sampling kernels, emulated.
treadle_test(cuda_sample_test
  SOURCES cuda/sampling/sample_test.cc cuda/sampling/sample_order_test.cc
  DEPENDS treadle_cuda_emulated treadle_reference)
