# The emulated GPU itself, and the real one where this build has it.
treadle_test(simt_test
  SOURCES cuda/runtime/simt_test.cc cuda/runtime/simt_order_test.cc cuda/runtime/warpgroup_test.cc
          cuda/row_int8/warpgroup_int8_test.cc
  DEPENDS treadle_emulated_gpu)
treadle_test(emulated_device_test
  SOURCES cuda/runtime/emulated_device_test.cc
  DEPENDS treadle_emulated_gpu)
treadle_test(cuda_low_bit_test
  SOURCES cuda/low_bit/low_bit_test.cc cuda/low_bit/low_bit_layout_test.cc
  DEPENDS treadle_cuda_emulated treadle_op_cases)
if(TREADLE_HAS_CUDA)
  treadle_test(cuda_device_test
    SOURCES cuda/runtime/device_test.cu
    DEPENDS treadle_cuda)
  treadle_cuda_options(cuda_device_test)
endif()
