treadle_test(tokenizer_test
  SOURCES tokenizer_test.cc tokenizer_oracle.cc
  DEPENDS treadle_tokenizer)
treadle_test(chat_template_test
  SOURCES chat_template_test.cc
  DEPENDS treadle_tokenizer)
if(TARGET treadle_models)
  treadle_test(default_tokenizer_test
    SOURCES default_tokenizer_test.cc tokenizer_oracle.cc
    DEPENDS treadle_models)
endif()
