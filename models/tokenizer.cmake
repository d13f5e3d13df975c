# Text <-> tokens, and chat templates.
find_package(absl REQUIRED)
find_package(nlohmann_json REQUIRED GLOBAL)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET GLOBAL libpcre2-8)

treadle_library(treadle_tokenizer
  SOURCES
    added_tokens.cc
    bpe_merges.cc
    byte_level_bpe.cc
    chat_template.cc
    jinja_evaluate.cc
    jinja_expression_parser.cc
    jinja_filters.cc
    jinja_format.cc
    jinja_globals.cc
    jinja_interpreter.cc
    jinja_lexer.cc
    jinja_methods.cc
    jinja_parser.cc
    jinja_tests.cc
    jinja_value.cc
    pre_tokenizer.cc
    sentencepiece_bpe.cc
    tokenizer.cc
    tokenizer_json.cc
    tokenizer_json_writer.cc
    unicode.cc
    unicode_nfc.cc
  DEPENDS treadle_base absl::flat_hash_map PkgConfig::PCRE2 nlohmann_json::nlohmann_json)
