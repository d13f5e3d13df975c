# Sampling kernels, emulated.
treadle_test(cuda_sample_test
  SOURCES cuda/sample_test.cc cuda/sample_order_test.cc
  DEPENDS treadle_cuda_emulated treadle_reference)
