# Sources of the CUDA backend, relative to this folder. They are compiled twice: for a GPU, and as
# plain C++ for the emulation (kernels/cuda/emulation).
set(TREADLE_CUDA_KERNELS  # .cu: kernels and their launches, against simt.h and device.h
  attention.cu attention_general.cu attention_warpgroups_bf16.cu attention_warpgroups_f16.cu
  rotary.cu
  sample.cu
  rows.cu
  rank_sum.cu
  low_bit_decode.cu low_bit_few_bf16.cu low_bit_few_f16.cu low_bit_rows.cu
  row_int8_rows.cu row_int8_stream.cu row_int8_tiles.cu row_int8_warpgroups.cu
  convert.cu dense_f32.cu dense_stream.cu dense_tiles.cu
)
set(TREADLE_CUDA_HOST  # .cc of both
  low_bit.cc low_bit_few.cc low_bit_pack.cc
  announced_batch.cc batch_upload.cc cuda_backend.cc cuda_devices.cc result_delivery.cc
  row_int8.cc row_int8_pack.cc row_int8_plan.cc
  dense.cc dense_pack.cc matmul.cc
)
set(TREADLE_CUDA_DEVICE_ONLY  # of the real target only
  cublas_lt.cc
  cuda_device.cc
  probe.cu
  shared_library.cc
)
