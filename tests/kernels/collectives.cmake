# Communicators.
treadle_test(thread_communicator_test
  SOURCES thread_communicator_test.cc
  DEPENDS treadle_collectives treadle_sampling)
