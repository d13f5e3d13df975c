# Ops on the K/V cache, on the emulated device.
treadle_test(cuda_attention_test
  SOURCES cuda/attention/attention_map_test.cc cuda/attention/attention_test.cc cuda/attention/rotary_test.cc
  DEPENDS treadle_cuda_emulated)
