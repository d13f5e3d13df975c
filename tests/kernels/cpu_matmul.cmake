treadle_test(thread_pool_test SOURCES thread_pool_test.cc DEPENDS treadle_cpu)
treadle_test(cpu_matmul_test SOURCES cpu_matmul_test.cc
  DEPENDS treadle_cpu treadle_op_cases treadle_reference)
