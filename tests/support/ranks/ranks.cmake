# Ranks as threads and processes, and a communicator that mistreats messages.
treadle_library(treadle_ranks_support
  SOURCES
    ${CMAKE_SOURCE_DIR}/tests/support/faults/faulty_communicator.cc
    ${CMAKE_CURRENT_LIST_DIR}/ranks.cc
  DEPENDS treadle_base)
