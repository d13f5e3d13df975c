# Sources of the CUDA backend, relative to this folder. They are compiled twice: for a GPU, and as
# plain C++ for the emulation (tests/emulation).
set(TREADLE_CUDA_KERNELS  # .cu: kernels and their launches, against simt.h and device.h
  attention/attention.cu attention/attention_general.cu attention/attention_warpgroups_bf16.cu attention/attention_warpgroups_f16.cu
  attention/rotary.cu
  sampling/sample.cu
  rows/elements.cu rows/experts.cu rows/low_rank.cu rows/norms.cu rows/pages.cu
  states/convolution.cu states/gated_delta.cu
  low_bit/low_bit_decode.cu low_bit/low_bit_few_bf16.cu low_bit/low_bit_few_f16.cu low_bit/low_bit_rows.cu
  row_int8/row_int8_rows.cu row_int8/row_int8_stream.cu row_int8/row_int8_tiles.cu row_int8/row_int8_warpgroups.cu
  dense/convert.cu dense/dense_f32.cu dense/dense_stream.cu dense/dense_tiles.cu
)
set(TREADLE_CUDA_HOST  # .cc of both
  low_bit/low_bit.cc low_bit/low_bit_few.cc low_bit/low_bit_pack.cc
  runtime/batch_upload.cc cuda_backend.cc cuda_ops.cc runtime/result_delivery.cc
  row_int8/row_int8.cc row_int8/row_int8_plan.cc
  dense/dense.cc matmul.cc
)
set(TREADLE_CUDA_DEVICE_ONLY  # of the real target only
  dense/cublas_lt.cc
  runtime/cuda_device.cc
  runtime/probe.cu
  runtime/shared_library.cc
)
