# The NCCL communicator: its logic against a library of threads instead of GPUs, and on GPUs.
if(TREADLE_HAS_NCCL)
  # kernels/collectives on emulated GPUs, instead of treadle_nccl.
  treadle_library(treadle_fake_nccl
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/nccl/fake_nccl.cc
      ${CMAKE_SOURCE_DIR}/kernels/collectives/nccl_communicator.cc
      ${CMAKE_SOURCE_DIR}/kernels/collectives/nccl_lane.cc
    DEPENDS treadle_cuda_emulated)
  target_include_directories(treadle_fake_nccl SYSTEM PRIVATE
    ${CUDAToolkit_INCLUDE_DIRS} ${NCCL_INCLUDE_DIR})
  treadle_test(nccl_communicator_test
    SOURCES cuda/nccl/nccl_communicator_test.cc
    DEPENDS treadle_fake_nccl treadle_ranks_support)
  treadle_test(shared_library_test SOURCES cuda/nccl/shared_library_test.cc DEPENDS treadle_nccl)
  treadle_test(nccl_gpu_test
    SOURCES cuda/nccl/nccl_gpu_test.cc
    DEPENDS treadle_nccl treadle_ranks_support)
endif()
