# Sources of CpuOps: those that are compiled once, and those that are compiled once per
# instruction set with TREADLE_ISA defined (isa_kernel.h). Some are both.
set(TREADLE_CPU_OPS_BOTH ops/activation.cc ops/convolution.cc ops/experts.cc ops/low_rank.cc
  ops/norm.cc ops/rotary.cc ops/state.cc)
set(TREADLE_CPU_OPS_SOURCES ops/attention.cc ops/sample.cc ${TREADLE_CPU_OPS_BOTH})
set(TREADLE_CPU_OPS_ISA_SOURCES ops/attention_kernels.cc ops/sample_kernels.cc ${TREADLE_CPU_OPS_BOTH})
