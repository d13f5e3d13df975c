# Products of the CUDA backend on the emulated device.
treadle_test(cuda_matmul_test
  SOURCES cuda/matmul_test.cc cuda/matmul_input_test.cc cuda/dense/dense_plan_test.cc
  DEPENDS treadle_cuda_emulated treadle_op_cases)
treadle_test(cuda_row_int8_test
  SOURCES cuda/row_int8/row_int8_layout_test.cc cuda/row_int8/row_int8_test.cc cuda/row_int8/row_int8_warpgroups_test.cc
  DEPENDS treadle_cuda_emulated treadle_op_cases treadle_cpu treadle_reference)
