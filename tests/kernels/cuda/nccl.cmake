# The NCCL communicator: its logic against a library of threads instead of GPUs, and on GPUs.
if(TREADLE_HAS_NCCL)
  treadle_test(nccl_communicator_test
    SOURCES cuda/nccl_communicator_test.cc cuda/fake_nccl.cc
      ${CMAKE_SOURCE_DIR}/kernels/collectives/nccl_communicator.cc
      ${CMAKE_SOURCE_DIR}/kernels/collectives/nccl_lane.cc
    DEPENDS treadle_cuda_emulated treadle_ranks_support)
  target_include_directories(nccl_communicator_test SYSTEM PRIVATE
    ${CUDAToolkit_INCLUDE_DIRS} ${NCCL_INCLUDE_DIR})
  treadle_test(shared_library_test SOURCES cuda/shared_library_test.cc DEPENDS treadle_nccl)
  treadle_test(nccl_gpu_test
    SOURCES cuda/nccl_gpu_test.cc
    DEPENDS treadle_nccl treadle_ranks_support)
endif()
