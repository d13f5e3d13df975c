if(TARGET treadle_models)
  treadle_test(model_test
    SOURCES model_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_tiny_model treadle_cpu treadle_reference)
  treadle_test(default_model_logits_test
    SOURCES default_model_logits_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_cpu
    PROPERTIES RUN_SERIAL ON)
  treadle_test(tensor_parallel_test
    SOURCES tensor_parallel_test.cc shard_check_test.cc
    DEPENDS treadle_models treadle_tiny_model treadle_collectives treadle_cpu treadle_reference)
  treadle_test(gguf_test
    SOURCES gguf_test.cc
    DEPENDS treadle_models treadle_tiny_model treadle_reference)
  treadle_test(safetensors_test
    SOURCES safetensors_test.cc
    DEPENDS treadle_models treadle_tiny_model treadle_reference)
  treadle_test(random_checkpoint_test
    SOURCES random_checkpoint_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_reference)
  treadle_test(weight_plan_test
    SOURCES weight_plan_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_tiny_model treadle_reference)
  treadle_test(quantize_checkpoint_test
    SOURCES quantize_checkpoint_test.cc gguf_from_folder_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_tiny_model treadle_reference)
  treadle_test(quantized_checkpoint_test
    SOURCES quantized_checkpoint_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_cpu treadle_reference)
  treadle_test(lookup_table_test
    SOURCES lookup_table_test.cc
    DEPENDS treadle_models treadle_tiny_model treadle_op_cases treadle_cpu)
  treadle_test(inspect_test
    SOURCES inspect_test.cc
    DEPENDS treadle_models treadle_tiny_model treadle_reference)
  if(TARGET treadle_cuda_emulated)
    treadle_test(input_type_test
      SOURCES input_type_test.cc teacher_forcing.cc
      DEPENDS treadle_models treadle_tiny_model treadle_cuda_emulated treadle_reference)
  endif()
endif()
