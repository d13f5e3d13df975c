# Ranks on GPUs, over NCCL (which is opened at run time); without its header, the same functions say
# so.
set(TREADLE_HAS_NCCL OFF CACHE INTERNAL "")
if(TREADLE_HAS_CUDA)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(NCCL_INCLUDE_DIR)
    set(TREADLE_HAS_NCCL ON CACHE INTERNAL "")
  endif()
endif()
message(STATUS "NCCL: ${TREADLE_HAS_NCCL}")
if(TREADLE_HAS_NCCL)
  treadle_library(treadle_nccl
    SOURCES
      ${CMAKE_CURRENT_LIST_DIR}/nccl_communicator.cc
      ${CMAKE_CURRENT_LIST_DIR}/nccl_lane.cc
      ${CMAKE_CURRENT_LIST_DIR}/nccl_library.cc
    DEPENDS treadle_base treadle_cuda)
  target_include_directories(treadle_nccl SYSTEM PRIVATE ${NCCL_INCLUDE_DIR})
else()
  treadle_library(treadle_nccl SOURCES ${CMAKE_CURRENT_LIST_DIR}/no_nccl.cc DEPENDS treadle_base)
endif()
