# What CpuOps is made of: sources that are compiled once, and those that are compiled once per
# instruction set with TREADLE_ISA defined (isa.h).
set(TREADLE_CPU_OPS_SOURCES ops/attention.cc ops/cpu_ops.cc ops/sample.cc)
set(TREADLE_CPU_OPS_ISA_SOURCES
  ops/activation.cc ops/attention_kernels.cc ops/norm.cc ops/op_kernels.cc ops/rotary.cc ops/sample_kernels.cc)
