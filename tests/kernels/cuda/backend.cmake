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

# What the compiled kernels need, against what GPUs have. Launches are the emulated device's, registers those of nvcc's build.
treadle_test(cuda_kernel_needs_test
  SOURCES cuda/runtime/kernel_needs_test.cc
  DEPENDS treadle_cuda_emulated treadle_op_cases)
if(TREADLE_HAS_CUDA)
  add_dependencies(cuda_kernel_needs_test treadle_cuda)
  target_include_directories(cuda_kernel_needs_test SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  cmake_path(RELATIVE_PATH CMAKE_BINARY_DIR BASE_DIRECTORY ${CMAKE_SOURCE_DIR} OUTPUT_VARIABLE build_folder)
  target_compile_definitions(cuda_kernel_needs_test PRIVATE
    TREADLE_PTXAS_REPORTS="${build_folder}/kernels/cuda/CMakeFiles/treadle_cuda.dir")
endif()
