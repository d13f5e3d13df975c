# The CPU backend's ops other than matrix products.
treadle_test(cpu_ops_test
  SOURCES cpu_attention_test.cc cpu_ops_test.cc cpu_sample_test.cc cpu_vector_math_test.cc
  DEPENDS treadle_cpu treadle_op_checks)
treadle_isa_sources(cpu_ops_test vector_exp.cc)  # the vector kernels' exp
