# The kernel benchmark. Its loops for the machine's ceilings are compiled per instruction set.
set(on_gpus kernels/no_cuda.cc)
if(TREADLE_HAS_CUDA)
  set(on_gpus kernels/cuda_peaks.cc kernels/int8_baseline.cc kernels/library_int8.cu)
endif()
treadle_library(treadle_kernel_bench
  SOURCES kernels/cold_products.cc kernels/expert_layer.cc kernels/kernel_bench.cc kernels/layer_cases.cc kernels/machine_peaks.cc ${on_gpus}
  DEPENDS absl::str_format treadle_cpu treadle_cuda_backend treadle_reference treadle_models treadle_op_cases
    nlohmann_json::nlohmann_json)
treadle_isa_sources(treadle_kernel_bench kernels/peak_loops.cc)
if(TREADLE_HAS_CUDA)
  treadle_cuda_options(treadle_kernel_bench)
endif()
