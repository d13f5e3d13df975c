# A tiny checkpoint on disk, as GGUF or as a Hugging Face folder.
treadle_library(treadle_tiny_model
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/gguf_writer.cc
    ${CMAKE_CURRENT_LIST_DIR}/tiny_model.cc
    ${CMAKE_CURRENT_LIST_DIR}/tiny_tensors.cc
    ${CMAKE_CURRENT_LIST_DIR}/tiny_tokenizer.cc
  DEPENDS treadle_models treadle_formats nlohmann_json::nlohmann_json)
