treadle_test(gloo_communicator_test
  SOURCES gloo_communicator_test.cc gloo_latency_test.cc
  DEPENDS treadle_gloo treadle_ranks_support)
