# Ranks in different processes, over Gloo's TCP transport.
find_package(Gloo REQUIRED)
treadle_library(treadle_gloo
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/data_interface.cc ${CMAKE_CURRENT_LIST_DIR}/gloo_communicator.cc
  DEPENDS treadle_base gloo)
