# The CUDA backend as a whole. The op cases run on the emulated GPU, and on a real one where this
# build and the machine have it.
treadle_test(cuda_batch_upload_test
  SOURCES cuda/runtime/batch_upload_test.cc cuda/runtime/result_delivery_test.cc
  DEPENDS treadle_cuda_emulated)
treadle_test(cuda_emulated_backend_test
  SOURCES cuda/cuda_backend_test.cc cuda/cuda_graph_test.cc cuda/emulated_settings.cc
          cuda/rows/row_output_test.cc
  DEPENDS treadle_cuda_emulated treadle_op_checks)
if(TREADLE_HAS_CUDA)
  treadle_test(cuda_backend_test
    SOURCES cuda/cuda_backend_test.cc
    DEPENDS treadle_cuda treadle_op_checks)
endif()
