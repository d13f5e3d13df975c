# What CpuOps is made of: sources that are compiled once, and those that are compiled once per
# instruction set with TREADLE_ISA defined (isa.h).
set(TREADLE_CPU_OPS_SOURCES attention.cc cpu_ops.cc sample.cc)
set(TREADLE_CPU_OPS_ISA_SOURCES
  activation.cc attention_kernels.cc norm.cc op_kernels.cc rotary.cc sample_kernels.cc)
