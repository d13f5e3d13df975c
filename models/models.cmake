# Checkpoints, and forward passes over a backend's ops.
treadle_library(treadle_models
  SOURCES
    checkpoint.cc
    gguf.cc
    gguf_checkpoint.cc
    gguf_tokenizer.cc
    gpt2.cc
    hf_checkpoint.cc
    hf_config.cc
    inspect.cc
    json_file.cc
    llama.cc
    mapped_file.cc
    registry.cc
    rotary_embedding.cc
    safetensors.cc
    weight_loader.cc
  DEPENDS treadle_tokenizer treadle_formats nlohmann_json::nlohmann_json)
